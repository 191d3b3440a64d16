"""Nodes of Python's syntax trees."""

import ast


def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a source like `ast.walk`, without operators that have no fields."""
    found: list[ast.AST] = [ast.parse(source)]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                found.append(value)
    return found
