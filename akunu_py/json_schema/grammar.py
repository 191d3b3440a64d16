"""The grammar of the JSON values that fit a schema.

Properties come in any order; in an ordered layout, and where they are counted or a pattern wants
some of them, in the order in which the schema names them, with others behind them.
"""

from __future__ import annotations

from typing import Any

from akunu_py.json_schema import arrays, digits, objects, scalars
from akunu_py.json_schema.builder import FREE, Builder, Layout
from akunu_py.json_schema.formula import (
    FALSE,
    TRUE,
    TYPES,
    Document,
    Formula,
    Impossible,
    Refused,
)
from akunu_py.json_schema.patterns import Unsupported
from akunu_py.json_schema.rules import Rule


def grammar(schema: Any, layout: Layout = FREE, prefix: str = "") -> str:
    """The grammar, in llguidance's dialect of Lark, of the values that fit `schema`.

    prefix: of the names of all its rules, lower-case letters and digits. Raises Refused.
    """
    if schema is False:
        raise Impossible("#", "there is nothing that it allows")
    try:
        builder = Builder(Document(schema), layout, prefix)
        start = builder.start(("schema", 0) if isinstance(schema, dict) and schema else TRUE)
        _run(builder)
        written = builder.rules.written(start)
    except Refused:
        raise
    except ValueError as error:  # of llguidance
        raise Refused("#", str(error)) from error
    if written is None:
        raise Impossible(builder.dead_end(start), "no value can fit it")
    return written


def _run(builder: Builder) -> None:
    while builder.pending:
        rule, formula = builder.pending.pop()
        for kind in TYPES:
            try:
                _add(builder, rule, kind, builder.simplifier.seen(formula, kind))
            except Unsupported as error:
                raise Refused(builder.place(formula), str(error)) from error
            except Refused as error:
                if error.place == "#":
                    raise Refused(builder.place(formula), str(error)) from error
                raise


def _add(builder: Builder, rule: Rule, kind: str, formula: Formula) -> None:
    if formula == FALSE:
        return
    if kind == "number":
        _add_numbers(builder, rule, formula)
    elif kind in scalars.SCALARS:
        written = scalars.written(kind, formula, builder.layout.notation)
        if written is not None:
            builder.rules.add(rule, written)
    else:
        make = arrays.add if kind == "array" else objects.add
        for literals in builder.simplifier.normal_form(formula):
            make(builder, rule, literals)


def _add_numbers(builder: Builder, rule: Rule, formula: Formula) -> None:
    try:
        expr = scalars.number(formula)
    except Unsupported:
        digits.add(builder, rule, formula)
    else:
        if expr is not None:
            builder.rules.add(rule, (expr,))
