"""JSON schemas as formulas: and, or and not of assertions, each about values of one type.

A formula is a tuple whose first item is its kind. Subschemas are references, which are resolved
when they are needed, so a schema may refer to itself. Values of other types fulfill an assertion.
All values fulfill "others", which says whether the schema mentions further properties.
Titles, unknown keywords and unknown formats have no effect, as the standard says.
"""

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from akunu_py.errors import SchemaError
from akunu_py.json_schema.patterns import FORMATS

Formula = tuple[Any, ...]

TYPES = ("null", "boolean", "number", "string", "array", "object")
TRUE: Formula = ("and",)
FALSE: Formula = ("or",)
# Of drafts 2019-09 and later, all of which older ones ignore.
_UNSUPPORTED = ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
_MAX_SCHEMAS = 20_000


def conjunction(parts: Iterable[Formula]) -> Formula:
    flat: dict[Formula, None] = {}
    for part in parts:
        if part == FALSE:
            return FALSE
        flat |= dict.fromkeys(part[1:] if part[0] == "and" else (part,))
    return next(iter(flat)) if len(flat) == 1 else ("and", *flat)


def disjunction(parts: Iterable[Formula]) -> Formula:
    flat: dict[Formula, None] = {}
    for part in parts:
        if part == TRUE:
            return TRUE
        flat |= dict.fromkeys(part[1:] if part[0] == "or" else (part,))
    return next(iter(flat)) if len(flat) == 1 else ("or", *flat)


def negation(part: Formula) -> Formula:
    if part in (TRUE, FALSE):
        return FALSE if part == TRUE else TRUE
    return part[1] if part[0] == "not" else ("not", part)


def equals(value: Any) -> Formula:
    if isinstance(value, list):
        items = ("items", tuple(map(equals, value)), FALSE)
        return conjunction([("type", "array"), ("minItems", len(value)), items])
    if isinstance(value, dict):
        names = tuple((name, equals(each)) for name, each in value.items())
        parts: list[Formula] = [("type", "object"), ("properties", names, (), FALSE)]
        return conjunction([*parts, *(("required", name) for name in value)])
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, str):
        return ("string", value)
    return ("null",) if value is None else ("number", number(value))


def number(value: float) -> Decimal:
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


class Document:
    """A schema and its subschemas, by number; the whole is 0. Raises SchemaError."""

    def __init__(self, schema: Any) -> None:
        self._schemas: list[tuple[Any, str, str]] = []  # with its place and its base URI
        self._numbers: dict[int, int] = {}  # by `id` of the schema
        self._formulas: dict[int, Formula] = {}
        self._by_uri: dict[str, Any] = {}
        self._schema = schema
        dialect = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
        # Before 2019-09 keywords next to a $ref are ignored.
        self.refs_stand_alone = any(f"draft-0{old}" in dialect for old in (3, 4, 6, 7))
        self._index(schema, "", 0)
        self.root = self.reference(schema, "#", self._base_uri(schema, ""))

    def reference(self, schema: Any, place: str, base: str) -> Formula:
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return FALSE
        if not isinstance(schema, dict):
            raise SchemaError(f"expected a schema, found {json.dumps(schema):.80}", place)
        if id(schema) not in self._numbers:
            if len(self._schemas) >= _MAX_SCHEMAS:
                raise SchemaError(f"there are more than {_MAX_SCHEMAS:,} subschemas")
            self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append((schema, place, self._base_uri(schema, base)))
        return ("schema", self._numbers[id(schema)])

    def place(self, index: int) -> str:
        return self._schemas[index][1]

    def formula(self, index: int) -> Formula:
        """Return the formula of a subschema, in which its own subschemas are references."""
        if index not in self._formulas:
            schema, place, base = self._schemas[index]
            self._formulas[index] = _Keywords(self, schema, place, base).formula()
        return self._formulas[index]

    def resolve(self, target: str, place: str, base: str) -> Formula:
        uri, fragment = urldefrag(urljoin(base, target))
        found = self._by_uri.get(f"{uri}#{fragment}")
        if found is None and fragment[:1] in ("", "/"):
            found = _pointer_target(self._by_uri.get(f"{uri}#"), fragment)
            if found is None and target.startswith("#"):  # `id` is a property here
                found = _pointer_target(self._schema, fragment)
        if found is None:
            raise SchemaError(f"$ref: {target!r:.100} is not in the schema", place)
        return self.reference(found, f"#{fragment}", uri)

    def _index(self, part: Any, base: str, depth: int) -> None:
        """Record the identifiers and anchors in a part of the document."""
        if isinstance(part, dict):
            base = self._base_uri(part, base)
            if not depth or "$id" in part or "id" in part:
                self._by_uri.setdefault(f"{base}#", part)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(key), str):
                    self._by_uri[f"{base}#{part[key]}"] = part
            identifier = part.get("$id", part.get("id"))
            if isinstance(identifier, str) and identifier.startswith("#"):
                self._by_uri[f"{base}{identifier}"] = part
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for each in inner:
            self._index(each, base, depth + 1)

    @staticmethod
    def _base_uri(schema: Any, base: str) -> str:
        identifier = schema.get("$id", schema.get("id")) if isinstance(schema, dict) else None
        if not isinstance(identifier, str) or identifier.startswith("#"):
            return base
        return urldefrag(urljoin(base, identifier))[0]


def _pointer_target(document: Any, pointer: str) -> Any:
    """Return the target of a JSON pointer, None if there is none."""
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict):
            document = document.get(name)
        elif isinstance(document, list) and name.isdigit() and int(name) < len(document):
            document = document[int(name)]
        else:
            return None
    return document


class _Keywords:
    def __init__(self, document: Document, schema: dict[str, Any], place: str, base: str) -> None:
        self._document, self._schema = document, schema
        self._place, self._base = place, base

    def formula(self) -> Formula:
        schema = self._schema
        targets: list[Formula] = []
        if isinstance(schema.get("$ref"), str):
            targets = [self._document.resolve(schema["$ref"], self._place, self._base)]
            if self._document.refs_stand_alone:
                return targets[0]
        for key in _UNSUPPORTED:
            if key in schema and schema[key] is not True:
                raise SchemaError(f"{key} is not supported", self._place)
        parts = [*self._types(), *self._numbers(), *self._strings()]
        parts += [*self._arrays(), *self._objects(), *targets, *self._combined()]
        return conjunction(parts)

    def _subschema(self, schema: Any, *path: object) -> Formula:
        names = (str(name).replace("~", "~0").replace("/", "~1") for name in path)
        return self._document.reference(schema, "/".join((self._place, *names)), self._base)

    def _get(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        """Return the value of a keyword, None if it is missing."""
        value = self._schema.get(key)
        if value is None and key not in self._schema:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise SchemaError(f"{key} must be {what}, is {json.dumps(value):.80}", self._place)
        return value

    def _subschemas(self, key: str) -> list[Formula]:
        listed = self._get(key, list, "a list of schemas") or []
        return [self._subschema(each, key, at) for at, each in enumerate(listed)]

    def _types(self) -> Iterator[Formula]:
        schema = self._schema
        names = schema.get("type", "any")
        names = names if isinstance(names, list) else [names]
        for name in names:
            if name not in (*TYPES, "integer", "any"):
                raise SchemaError(f"unknown type {json.dumps(name):.80}", self._place)
        if "any" not in names:
            integer = conjunction([("type", "number"), ("integer",)])
            yield disjunction(integer if each == "integer" else ("type", each) for each in names)
        if "enum" in schema:
            yield disjunction(map(equals, self._get("enum", list, "a list")))
        if "const" in schema:
            yield equals(schema["const"])

    def _numbers(self) -> Iterator[Formula]:
        for key, kind in (("minimum", "least"), ("maximum", "most")):
            exclusive = "exclusive" + key.capitalize()
            flag = self._schema.get(exclusive)
            if (bound := self._number(key)) is not None:
                yield kind, number(bound), flag is True
            if not isinstance(flag, bool) and (bound := self._number(exclusive)) is not None:
                yield kind, number(bound), True
        if (step := self._number("multipleOf")) is not None:
            if not 0 < step < float("inf"):
                raise SchemaError("multipleOf must be above 0 and finite", self._place)
            yield "multiple", number(step).normalize()

    def _number(self, key: str) -> Any:
        return self._get(key, (int, float), "a number")

    def _strings(self) -> Iterator[Formula]:
        low, high = self._count("minLength"), self._count("maxLength")
        if low or high is not None:
            yield "length", low or 0, high
        if (pattern := self._get("pattern", str, "a string")) is not None:
            yield "pattern", pattern
        name = self._schema.get("format")
        if isinstance(name, str) and name in FORMATS:
            yield "pattern", FORMATS[name]

    def _count(self, key: str) -> int | None:
        value = self._number(key)
        if value is not None and (value < 0 or value % 1):
            raise SchemaError(f"{key} must be an integer of at least 0, is {value}", self._place)
        return None if value is None else int(value)

    def _counts(self, noun: str) -> Iterator[Formula]:
        """Yield the limits on the number of "Items" or "Properties"."""
        if low := self._count(f"min{noun}"):
            yield f"min{noun}", low
        if (high := self._count(f"max{noun}")) is not None:
            yield f"max{noun}", high

    def _arrays(self) -> Iterator[Formula]:
        schema = self._schema
        prefix, rest = tuple(self._subschemas("prefixItems")), "items"
        if not prefix and isinstance(schema.get("items"), list):  # before 2020-12
            prefix, rest = tuple(self._subschemas("items")), "additionalItems"
        if prefix or rest in schema:
            yield "items", prefix, self._subschema(schema.get(rest, True), rest)
        yield from self._counts("Items")
        if schema.get("uniqueItems") is True:
            yield ("unique",)
        if "contains" in schema:
            least = self._count("minContains")
            if "maxContains" in schema or (least or 0) > 1:
                why = "maxContains and minContains above 1 are not supported"
                raise SchemaError(why, self._place)
            if least != 0:
                yield "contains", 0, self._subschema(schema["contains"], "contains")

    def _objects(self) -> Iterator[Formula]:
        schema = self._schema
        names, patterns = (
            {name: self._subschema(each, key, name) for name, each in self._mapping(key)}
            for key in ("properties", "patternProperties")
        )
        extra = "additionalProperties"
        if names or patterns or extra in schema:
            others = self._subschema(schema.get(extra, True), extra)
            yield "properties", tuple(names.items()), tuple(patterns.items()), others
        if "properties" in schema and not patterns:
            yield "others", "mentioned" if extra in schema else "unmentioned"
        if isinstance(schema.get("required"), bool):  # of draft 3; later ones know lists only
            raise SchemaError("required must be a list of names", self._place)
        for name in self._get("required", list, "a list of names") or []:
            yield "required", str(name)
        yield from self._counts("Properties")
        if "propertyNames" in schema:
            yield "names", self._subschema(schema["propertyNames"], "propertyNames")
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in self._mapping(key):
                wanted = [wanted] if isinstance(wanted, str) else wanted
                if isinstance(wanted, list):
                    then = conjunction(("required", str(each)) for each in wanted)
                else:
                    then = self._subschema(wanted, key, name)
                has = conjunction([("type", "object"), ("required", name)])
                yield disjunction([negation(has), then])

    def _mapping(self, key: str) -> Iterable[tuple[str, Any]]:
        return (self._get(key, dict, "an object") or {}).items()

    def _combined(self) -> Iterator[Formula]:
        schema = self._schema
        yield from self._subschemas("allOf")
        if "anyOf" in schema:
            yield disjunction(self._subschemas("anyOf"))
        if "oneOf" in schema:
            yield ("one", *self._subschemas("oneOf"))
        if "not" in schema:
            yield negation(self._subschema(schema["not"], "not"))
        if "if" in schema:
            condition = self._subschema(schema["if"], "if")
            then = self._subschema(schema.get("then", True), "then")
            otherwise = self._subschema(schema.get("else", True), "else")
            yield disjunction([negation(condition), then])
            yield disjunction([condition, otherwise])
