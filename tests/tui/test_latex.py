"""Mathematics of answers as Unicode; what is not known, or is none, stays as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.tui.transcript.markdown_parser import markdown_parser, to_unicode


def shown(text: str) -> str:
    """What the parser makes of a text, a line for each break."""
    children = (child for token in markdown_parser().parse(text) for child in token.children or [])
    return "".join("\n" if child.type == "hardbreak" else child.content for child in children)


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        ("a^2 + b_{10}", "a² + b₁₀"),
        (r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}", "x = (-b ± √(b²-4ac))/(2a)"),
        (r"\sum_{i=1}^{n} i = \frac{n(n+1)}{2}", "∑ᵢ₌₁ⁿ i = n(n+1)/2"),
        (r"\int_0^\infty e^{-x}\,dx", "∫₀^∞ e⁻ˣ dx"),
        (r"\frac12 \tfrac{dy}{dx}", "½ dy/dx"),
        (r"f\colon A\to B", r"f\colon A → B"),
        (r"\forall{x}\in\mathbb{R}: x\le y\implies x\neq z", "∀x ∈ ℝ: x ≤ y ⟹ x ≠ z"),
        (r"\lim_{n\to\infty} \log n", "lim_(n → ∞) log n"),
        (r"90^\circ \vec{v} \hat{abc}", r"90° v⃗ \hat{abc}"),
        (r"\left(\text{if } x\right)", "(if x)"),
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "a = b\nc = d"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "( 1   2 )\n( 3   4 )"),
        (
            r"\begin{bmatrix} 1 & 20 \\ 3 & 4 \end{bmatrix} x"
            r" = \begin{pmatrix} a \\ b \\ c \end{pmatrix}",
            "[ 1   20 ]     ( a )\n[ 3   4  ] x = ( b )\n               ( c )",
        ),
        (r"\{x\} 5\% \$3", "{x} 5% $3"),
        (r"\sqrt[3]{x}", "∛x"),
    ],
)
def test_the_common_part(tex: str, text: str) -> None:
    assert to_unicode(tex).replace("\u00a0", " ") == text


@pytest.mark.parametrize("tex", ["{a", "a}", "a^", "\\", r"\begin{foo} x", r"\frac{a}", "{" * 50])
def test_what_does_not_end_well_stays(tex: str) -> None:
    assert to_unicode(tex) == tex


PARTS = [
    r"\foo",
    r"\foo{\alpha}",
    r"\bar",
    r"\\",
    r"\(",
    r"\[",
    "{",
    "}",
    "^",
    "_",
    " ",
    "a",
    r"\alpha",
]


@settings(max_examples=32, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_no_unknown_command_is_eaten(tex: str) -> None:
    text = to_unicode(tex)
    assert text.count("\\foo") == tex.count("\\foo")
    assert to_unicode(tex.replace("\\", "")).count("\\") == 0


@settings(max_examples=32, deadline=None)
@given(st.lists(st.sampled_from([*PARTS, r"\)", r"\]", "$", "$$", "\n", "word"]), max_size=12))
def test_the_parser_takes_everything(parts: list[str]) -> None:
    text = "".join(parts)
    assert shown(text).count("\\foo") >= text.count("\\foo{\\alpha}")


@pytest.mark.parametrize(
    "text",
    [
        "from $5 to $10",
        "echo $HOME/bin:$PATH",
        "$A and $B",
        "open \\(a^2 and no end",
        "open \\[a^2 and no end",
        "a $ b $ c",
    ],
)
def test_what_is_no_mathematics_is_left_alone(text: str) -> None:
    assert shown(text) == text


def test_delimiters() -> None:
    assert shown(r"so \(a^2\), $b^2$, $$c^2$$ and \[d^2\].") == "so a², b², c² and d²."
    assert shown("so\n\\[\na^2\n- b\n\\]\nend") == "a² - b".join(["so", "end"])
    assert shown("$$\nx_1\n$$") == "x₁"
    assert shown("so\n\\begin{equation}\na^2\n\\end{equation}\nend") == "soa²end"
    assert shown("\\begin{align*}\na &= b \\\\\nc &= d\n\\end{align*}") == "a = b\nc = d"
    assert shown("\\begin{itemize}\na\n\\end{itemize}").startswith("\\begin{itemize}")
    matrix = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    assert shown(f"\\begin{{align*}}\nA &= {matrix} \\\\ x\n\\end{{align*}}") == shown(
        f"$$A = {matrix}\n\\\\ x$$"
    )
    assert shown(f"so ${matrix}$ is").replace("\u00a0", " ") == "so \n( 1 )\n( 2 )\n is"
    assert shown(r"\[not a link\] and \*") == "[not a link] and *"
    assert shown("`\\(a^2\\)`") == "\\(a^2\\)", "in code nothing is changed"
