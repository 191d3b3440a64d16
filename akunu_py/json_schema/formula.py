"""JSON schemas as formulas: and, or and not of assertions, each about values of one type.

A formula is a tuple whose first item is its kind. Subschemas are references, which are resolved
when they are needed, so a schema may refer to itself. Values of other types fulfill an assertion.
Titles, unknown keywords and unknown formats have no effect, as the standard says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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
_REFUSED = ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
_MAX_SCHEMAS = 20_000


def conjunction(parts: Iterable[Formula]) -> Formula:
    """Return the formula that all parts hold."""
    flat: dict[Formula, None] = {}
    for part in parts:
        if part == FALSE:
            return FALSE
        flat |= dict.fromkeys(part[1:] if part[0] == "and" else (part,))
    return next(iter(flat)) if len(flat) == 1 else ("and", *flat)


def disjunction(parts: Iterable[Formula]) -> Formula:
    """Return the formula that at least one part holds."""
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
    """Return the formula that only `value` fits."""
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
        self._numbers: dict[int, int] = {}  # by the identity of what the document holds
        self._formulas: dict[int, Formula] = {}
        self._by_uri: dict[str, Any] = {}
        self._whole = schema
        dialect = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
        # Before 2019-09 nothing beside a $ref counts.
        self.refs_stand_alone = any(f"draft-0{old}" in dialect for old in (3, 4, 6, 7))
        self._index(schema, "", 0)
        self.reference(schema, "#", self._id(schema, ""))

    def reference(self, schema: Any, place: str, base: str) -> Formula:
        """Return the formula that stands for a subschema."""
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
            self._schemas.append((schema, place, self._id(schema, base)))
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
        """Return the target of a $ref."""
        uri, fragment = urldefrag(urljoin(base, target))
        found = self._by_uri.get(f"{uri}#{fragment}")
        if found is None and fragment[:1] in ("", "/"):
            found = _pointed(self._by_uri.get(f"{uri}#"), fragment)
            if found is None and target.startswith(
                "#"
            ):  # The base came from an `id` that is no identifier.
                found = _pointed(self._whole, fragment)
        if found is None:
            raise SchemaError(f"$ref: {target!r:.100} is not in the schema", place)
        return self.reference(found, f"#{fragment}", uri)

    def _index(self, part: Any, base: str, depth: int) -> None:
        """Note the identifiers and anchors in a part of the document."""
        if isinstance(part, dict):
            base = self._id(part, base)
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
    def _id(schema: Any, base: str) -> str:
        identifier = schema.get("$id", schema.get("id")) if isinstance(schema, dict) else None
        if not isinstance(identifier, str) or identifier.startswith("#"):
            return base
        return urldefrag(urljoin(base, identifier))[0]


def _pointed(document: Any, pointer: str) -> Any:
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
    """The keywords of one schema."""

    def __init__(self, document: Document, schema: dict[str, Any], place: str, base: str) -> None:
        self._document, self._schema = document, schema
        self._place, self._base = place, base

    def formula(self) -> Formula:
        schema = self._schema
        if isinstance(schema.get("$ref"), str):
            target = self._document.resolve(schema["$ref"], self._place, self._base)
            if self._document.refs_stand_alone:
                return target
        for key in _REFUSED:
            if key in schema and schema[key] is not True:
                raise SchemaError(f"{key} is not supported", self._place)
        parts = [*self._types(), *self._numbers(), *self._strings()]
        parts += [*self._arrays(), *self._objects()]
        if isinstance(schema.get("$ref"), str):
            parts.append(target)
        parts += self._combined()
        return conjunction(parts)

    def _sub(self, schema: Any, *path: object) -> Formula:
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

    def _subs(self, key: str) -> list[Formula]:
        listed = self._get(key, list, "a list of schemas") or []
        return [self._sub(each, key, at) for at, each in enumerate(listed)]

    def _types(self) -> list[Formula]:
        schema = self._schema
        parts: list[Formula] = []
        names = schema.get("type", "any")
        names = names if isinstance(names, list) else [names]
        for name in names:
            if name not in (*TYPES, "integer", "any"):
                raise SchemaError(f"unknown type {json.dumps(name):.80}", self._place)
        if "any" not in names:
            integer = conjunction([("type", "number"), ("integer",)])
            parts.append(
                disjunction(integer if each == "integer" else ("type", each) for each in names)
            )
        if "enum" in schema:
            parts.append(disjunction(map(equals, self._get("enum", list, "a list"))))
        if "const" in schema:
            parts.append(equals(schema["const"]))
        return parts

    def _numbers(self) -> list[Formula]:
        parts: list[Formula] = []
        for key, kind in (("minimum", "least"), ("maximum", "most")):
            exclusive = "exclusive" + key.capitalize()
            flag = self._schema.get(exclusive)
            bound = self._get(key, (int, float), "a number")
            if bound is not None:
                parts.append((kind, number(bound), flag is True))
            if not isinstance(flag, bool) and (
                (bound := self._get(exclusive, (int, float), "a number")) is not None
            ):
                parts.append((kind, number(bound), True))
        step = self._get("multipleOf", (int, float), "a number")
        if step is not None:
            if step <= 0:
                raise SchemaError("multipleOf must be above 0", self._place)
            parts.append(("multiple", number(step).normalize()))
        return parts

    def _strings(self) -> list[Formula]:
        parts: list[Formula] = []
        low, high = self._count("minLength"), self._count("maxLength")
        if low or high is not None:
            parts.append(("length", low or 0, high))
        pattern = self._get("pattern", str, "a string")
        if pattern is not None:
            parts.append(("pattern", pattern))
        name = self._schema.get("format")
        if isinstance(name, str) and name in FORMATS:
            parts.append(("pattern", FORMATS[name]))
        return parts

    def _count(self, key: str) -> int | None:
        value = self._get(key, (int, float), "a number")
        if value is not None and (value < 0 or value != int(value)):
            raise SchemaError(f"{key} must be an integer from 0 on, is {value}", self._place)
        return None if value is None else int(value)

    def _arrays(self) -> list[Formula]:
        schema = self._schema
        parts: list[Formula] = []
        prefix, rest = tuple(self._subs("prefixItems")), "items"
        if not prefix and isinstance(schema.get("items"), list):  # before 2020-12
            prefix, rest = tuple(self._subs("items")), "additionalItems"
        if prefix or rest in schema:
            parts.append(("items", prefix, self._sub(schema.get(rest, True), rest)))
        if low := self._count("minItems"):
            parts.append(("minItems", low))
        if (high := self._count("maxItems")) is not None:
            parts.append(("maxItems", high))
        if schema.get("uniqueItems") is True:
            parts.append(("unique",))
        if "contains" in schema:
            least = self._count("minContains")
            if "maxContains" in schema or (least or 0) > 1:
                raise SchemaError(
                    "maxContains and minContains above 1 are not supported", self._place
                )
            if least != 0:
                parts.append(("contains", 0, self._sub(schema["contains"], "contains")))
        return parts

    def _objects(self) -> list[Formula]:
        schema = self._schema
        parts: list[Formula] = []
        names = self._get("properties", dict, "an object") or {}
        patterns = self._get("patternProperties", dict, "an object") or {}
        if names or patterns or "additionalProperties" in schema:
            named = ((name, self._sub(each, "properties", name)) for name, each in names.items())
            matched = (
                (pattern, self._sub(each, "patternProperties", pattern))
                for pattern, each in patterns.items()
            )
            others = self._sub(schema.get("additionalProperties", True), "additionalProperties")
            parts.append(("properties", tuple(named), tuple(matched), others))
        if isinstance(schema.get("required"), bool):  # of draft 3; later ones know lists only
            raise SchemaError("required must be a list of names", self._place)
        listed = self._get("required", list, "a list of names") or []
        parts += [("required", str(name)) for name in listed]
        if low := self._count("minProperties"):
            parts.append(("minProperties", low))
        if (high := self._count("maxProperties")) is not None:
            parts.append(("maxProperties", high))
        if "propertyNames" in schema:
            parts.append(("names", self._sub(schema["propertyNames"], "propertyNames")))
        return [*parts, *self._dependencies()]

    def _dependencies(self) -> list[Formula]:
        parts: list[Formula] = []
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, wanted in (self._get(key, dict, "an object") or {}).items():
                if isinstance(wanted, str):
                    wanted = [wanted]
                then: Formula
                if isinstance(wanted, list):
                    then = conjunction(("required", str(each)) for each in wanted)
                else:
                    then = self._sub(wanted, key, name)
                has = conjunction([("type", "object"), ("required", name)])
                parts.append(disjunction([negation(has), then]))
        return parts

    def _combined(self) -> list[Formula]:
        schema = self._schema
        parts: list[Formula] = list(self._subs("allOf"))
        if "anyOf" in schema:
            parts.append(disjunction(self._subs("anyOf")))
        if "oneOf" in schema:
            parts.append(("one", *self._subs("oneOf")))
        if "not" in schema:
            parts.append(negation(self._sub(schema["not"], "not")))
        if "if" in schema:
            condition = self._sub(schema["if"], "if")
            then = self._sub(schema.get("then", True), "then")
            otherwise = self._sub(schema.get("else", True), "else")
            parts.append(disjunction([negation(condition), then]))
            parts.append(disjunction([condition, otherwise]))
        return parts
