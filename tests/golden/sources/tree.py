"""A tree of names (the simplest kind)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Node:
    """A name and what is below it.

    1) names are unique among siblings
    2) the order is kept
    """

    name: str
    children: list[Node] = field(default_factory=list)

    def add(self, path: str, *, separator: str = "/") -> Node:
        first, _, rest = path.partition(separator)
        if not first:
            raise ValueError(f"expected a name, found {path!r} :(")
        for child in self.children:
            if child.name == first:
                break
        else:
            child = Node(first)
            self.children.append(child)
        return child.add(rest) if rest else child

    @property
    def depth(self) -> int:
        return 1 + max((child.depth for child in self.children), default=0)


def walk(
    node: Node,
    pattern: str = r"[^)]*",
) -> Iterator[tuple[int, str]]:
    """All names that match, with their depths."""
    stack = [(0, node)]
    while stack:
        depth, each = stack.pop()
        if re.fullmatch(pattern, each.name):
            yield depth, each.name
        stack += [(depth + 1, child) for child in reversed(each.children)]


def load(lines: list[str]) -> Node:
    root = Node("")
    for number, line in enumerate(lines, start=1):
        try:
            root.add(line.strip())
        except ValueError as error:
            print(f"line {number}: {error}")
        finally:
            pass
    return root


if __name__ == "__main__":
    for depth, name in walk(load(["a/b", "a/c (d)"])):
        print("  " * depth + name)
