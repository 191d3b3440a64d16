"""Numbers of JSON schemas as `Expr`s of how JSON writes them.

Where something is asked of their value they are written without an exponent.
"""

from __future__ import annotations

from decimal import Decimal

from akunu_py.json_schema.regex import Expr

NUMBER = Expr(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?")
PLAIN = Expr(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
INTEGER = Expr(r"-?(?:0|[1-9][0-9]*)")
FRACTION = Expr(r"-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*")  # and no integer
_FRACTION = r"(?:\.[0-9]+)?"
_POSITIVE_FRACTION = r"\.[0-9]*[1-9][0-9]*"
_ZEROS = r"(?:\.0+)?"
_MOST_ENDINGS = 1000


def exactly(value: Decimal) -> Expr:
    """All ways to write `value`."""
    sign, whole, fraction = _parts(value)
    zero = "-?" if value == 0 else ""
    return Expr(f"{zero}{sign}{whole}" + (rf"\.{fraction}0*" if fraction else _ZEROS))


def at_least(value: Decimal, *, strictly: bool = False) -> Expr:
    """Numbers from `value` on, `strictly` without it."""
    if value > 0 or (value == 0 and strictly):
        return Expr(_from(value, strictly))
    below = _to(-value, strictly)
    return Expr(f"(?:(?:0|[1-9][0-9]*){_FRACTION}|-{below})")


def at_most(value: Decimal, *, strictly: bool = False) -> Expr:
    """Numbers up to `value`, `strictly` without it."""
    if value < 0 or (value == 0 and strictly):
        return Expr(f"-{_from(-value, strictly)}")
    return Expr(f"(?:-(?:0|[1-9][0-9]*){_FRACTION}|{_to(value, strictly)})")


def _parts(value: Decimal) -> tuple[str, str, str]:
    """Its sign, its integer part, its decimals without the last zeros."""
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return "-" if value < 0 else "", whole.lstrip("0") or "0", fraction.rstrip("0")


def _from(value: Decimal, strictly: bool) -> str:
    """Non-negative numbers from a non-negative `value` on."""
    _, whole, fraction = _parts(value)
    greater = [f"[1-9][0-9]{{{len(whole)},}}"]
    greater += [
        f"{whole[:at]}[{int(digit) + 1}-9][0-9]{{{len(whole) - at - 1}}}"
        for at, digit in enumerate(whole)
        if digit < "9"
    ]
    options = [f"(?:{'|'.join(greater)}){_FRACTION}"]
    if not fraction:
        options.append(f"{whole}{_POSITIVE_FRACTION if strictly else _FRACTION}")
    else:
        more = [
            f"{fraction[:at]}[{int(digit) + 1}-9][0-9]*"
            for at, digit in enumerate(fraction)
            if digit < "9"
        ]
        more.append(f"{fraction}[0-9]*" + ("[1-9][0-9]*" if strictly else ""))
        options.append(rf"{whole}\.(?:{'|'.join(more)})")
    return f"(?:{'|'.join(options)})"


def _to(value: Decimal, strictly: bool) -> str:
    """Non-negative numbers up to a non-negative `value`."""
    _, whole, fraction = _parts(value)
    less = [f"[1-9][0-9]{{0,{len(whole) - 2}}}"] if len(whole) > 1 else []
    less += ["0"] if len(whole) > 1 else []
    less += [
        f"{whole[:at]}[{1 if at == 0 and len(whole) > 1 else 0}-{int(digit) - 1}]"
        f"[0-9]{{{len(whole) - at - 1}}}"
        for at, digit in enumerate(whole)
        if int(digit) > (1 if at == 0 and len(whole) > 1 else 0)
    ]
    options = [f"(?:{'|'.join(less)}){_FRACTION}"] if less else []
    if not fraction:
        options += [] if strictly else [f"{whole}{_ZEROS}"]
    else:
        fewer = [
            f"{fraction[:at]}[0-{int(digit) - 1}][0-9]*"
            for at, digit in enumerate(fraction)
            if digit > "0"
        ]
        fewer += [f"{fraction[:at]}" for at in range(1, len(fraction))]
        fewer += [] if strictly else [f"{fraction}0*"]
        options += [whole, rf"{whole}\.(?:{'|'.join(fewer)})"]
    # Nothing is below 0: a class without characters.
    return f"(?:{'|'.join(options)})" if options else "[a&&b]"


def multiples(step: Decimal) -> Expr | None:
    """Multiples of `step`, where the last digits tell them; None where they do not."""
    _, digits, exponent = step.normalize().as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    decimals = max(0, -exponent)
    whole *= 10 ** max(0, exponent)
    places = next((k for k in range(40) if 10**k % whole == 0), None)
    if places is None:
        return None
    width = max(places, decimals)
    if 10**width // whole > _MOST_ENDINGS:
        return None
    endings = []
    for ending in range(0, 10**width, whole):
        text = f"{ending:0{width}d}" if width else ""
        last, fraction = text[: width - decimals], text[width - decimals :].rstrip("0")
        short = last.lstrip("0") or "0"
        before = f"(?:[1-9][0-9]*{last}|{short})" if last else "(?:0|[1-9][0-9]*)"
        endings.append(before + (rf"\.{fraction}0*" if fraction else _ZEROS))
    return Expr(f"-?(?:{'|'.join(endings)})")
