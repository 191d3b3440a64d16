"""The compiler from JSON schemas to grammars in llguidance's dialect of Lark."""

from typing import Any

from akunu_py.errors import SchemaError, Unsatisfiable
from akunu_py.json_schema import scalars
from akunu_py.json_schema.containers import Builder, add_array, add_object
from akunu_py.json_schema.formula import FALSE, TYPES, Document, Formula
from akunu_py.json_schema.layouts import FREE, Layout
from akunu_py.json_schema.rules import Rule


def grammar(schema: Any, layout: Layout = FREE, prefix: str = "") -> str:
    """Return the grammar of the values that fit `schema`. Raises SchemaError.

    Properties come in any order. In an ordered layout, and where they are counted or required by a
    pattern, they come in the order of the schema, and other properties after them.

    prefix: of the names of all rules, lower-case letters and digits.
    """
    try:
        document = Document(schema)
        builder = Builder(document, layout, prefix)
        start = builder.start(document.root)
        while builder.pending:
            _add(builder, *builder.pending.pop())
        text = builder.rules.to_lark(start)
    except ValueError as error:  # of llguidance
        raise SchemaError(str(error)) from error
    if text is None:
        raise Unsatisfiable("no value can fit it", builder.dead_end(start))
    return text


def _add(builder: Builder, rule: Rule, formula: Formula) -> None:
    try:
        for kind in TYPES:
            restricted = builder.simplifier.restrict(formula, kind)
            if restricted == FALSE:
                continue
            if kind == "number":
                scalars.add_numbers(builder.rules, rule, restricted, builder.simplifier.spend)
            elif kind in scalars.SCALARS:
                text = scalars.grammar_of(kind, restricted, builder.layout.notation)
                builder.rules.add(rule, text)
            else:
                add = add_array if kind == "array" else add_object
                for literals in builder.simplifier.normal_form(restricted):
                    add(builder, rule, literals)
    except SchemaError as error:
        if error.place == "#":
            error.place = builder.place(formula)
        raise
