"""Request bodies: bounded JSON, pydantic models, conversations."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails
from pydantic_core.core_schema import tagged_union_schema

from akunu_py.files import parse_json
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.text import on_one_line
from akunu_py.types import Message

_KINDS = {  # names of a part's type or media type, by their content
    "image": "image",
    "audio": "audio",
    "video": "video",
    "document": "document",
    "pdf": "document",
    "file": "file",
}
_MAX_NAME = 100  # characters of a name or type
# Fields with the content, its name, and the field that contains both, in all dialects.
_DATA = ("data", "url", "image_url", "file_data", "input_audio", "video_url")
_NAMES = ("title", "filename", "name")


def describe(part: Mapping[str, Any]) -> str:
    """Return a line in place of a part, such as "[image, 84 kB: this model reads text only]"."""
    type_name = str(part.get("type", ""))
    kind = next((kind for text, kind in _KINDS.items() if text in type_name), type_name)
    inner = [part, *(each for each in part.values() if isinstance(each, Mapping))]
    name = next((str(each[key]) for each in inner for key in _NAMES if each.get(key)), "")
    sizes = [_size(each[key]) for each in inner for key in _DATA if isinstance(each.get(key), str)]
    size = f"{max(1, round(sizes[0] / 1000)):,} kB" if any(sizes[:1]) else ""
    named = [kind or "part", f"{name}"] if name else [kind or "part"]
    text = " ".join(on_one_line(each)[:_MAX_NAME] for each in named)
    return f"[{', '.join(filter(None, (text, size)))}: this model reads text only]"


def _size(data: str) -> int:
    """Return the number of bytes in base64 `data`; 0 if it is a URL."""
    head, comma, encoded = data.rpartition(",")
    if comma and not head.startswith("data:"):
        return 0
    return 0 if "://" in encoded[:20] else len(encoded) * 3 // 4 - encoded[-2:].count("=")


MAX_BYTES = 32 << 20  # of a body; more than any context needs
MAX_DEPTH = 64  # of nested JSON values
_UNION_MEMBERS = ("str", "int", "float", "bool", "none")  # in pydantic's locations
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_EXACT = 2.0**53  # floats below it represent integers exactly
_MAX_MESSAGE = 300  # characters of an error message
_MAX_ERRORS = 10_000  # of a body; each one takes memory

BodyType = TypeVar("BodyType", bound="Body")


class Body(BaseModel):
    """A request body, or part of one. `parse` drops unknown fields."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)
    _strict: bool = PrivateAttr(default=False)

    @property
    def streams(self) -> bool:
        """Whether the reply is streamed. Only of a whole body."""
        return bool(getattr(self, "stream", False))

    @property
    def unloads(self) -> bool:
        """Whether the model is unloaded after the reply. Only of a whole body."""
        return False

    @property
    def needs_model(self) -> bool:
        """Whether the model is loaded for the reply. Only of a whole body."""
        return True

    @property
    def ignored(self) -> list[str]:
        """The fields of the request without effect, in order. Only of a whole body."""
        return list(self._ignored)

    def ignore(self, name: str) -> None:
        """Record a field without effect. Raises RequestError if the server is strict."""
        if self._strict:
            message = on_one_line(f"unsupported parameter: {name}")
            raise RequestError(message[:_MAX_MESSAGE], param=name[:_MAX_MESSAGE])
        self._ignored[name] = None


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """An entry of a list, or the value of a field, that `parse` drops."""

    text: str  # an unknown type or text


def known_only(**synonyms: Any) -> WrapValidator:
    """Mark a field with a fixed set of texts: `parse` drops other texts, as it drops fields.

    synonyms: other names of known values.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str):
            return handler(value)
        try:
            return handler(synonyms.get(value, value))
        except ValidationError:
            return UnknownValue(value)

    return WrapValidator(check)


class ListEntry(Body):
    """An object with a type, mostly in a list; unknown types become an `UnknownValue`."""

    known_types: ClassVar[str]  # a regular expression

    @model_validator(mode="wrap")
    @classmethod
    def _check_type(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and not re.fullmatch(cls.known_types, kind):
            return UnknownValue(kind)
        return handler(value)


# Fields that clients send in all places, and that have no effect here: `parse` drops them without
# notice. Some describe the caller, some what always happens here; others repeat earlier answers.
_EXPECTED = {
    "allowed_callers", "annotations", "audio", "cache_control", "cache_prompt", "caller",
    "citations", "client_metadata", "context", "created_by", "data", "defer_loading",
    "description", "diagnostics", "eager_input_streaming", "generate_summary", "id", "id_slot",
    "include_obfuscation", "index", "inference_geo", "input_examples",
    "internal_chat_message_metadata_passthrough", "keep", "max_tool_calls", "metadata",
    "n_indent", "n_probs", "name", "namespace", "output_schema", "parsed", "parsed_arguments",
    "parsed_output", "phase", "prompt_cache_breakpoint", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "samplers",
    "service_tier", "signature", "speed", "status", "store", "t_max_prompt_ms", "time",
    "tool_call_id", "toolset_name", "truncate", "type", "user", "user_profile_id", "verbose",
    "verbosity", "workspace_id",
}  # fmt: skip


def _as_json_text(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value


# Clients write arguments and results of calls as JSON, as an object, or not at all, and keep them
# in their history: refusing one would fail all later requests.
AsJsonText = BeforeValidator(_as_json_text)
JsonText = Annotated[str, AsJsonText]


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class OtherPart(Body):
    """A part of a message that a text model cannot read."""

    type: str

    @property
    def text(self) -> str:
        return describe(self.model_dump())


class ByType:
    """Selects the member of a union by the value's `type`; unknown types go to the last one."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        members: Sequence[type[BaseModel]] = get_args(source)
        names = {
            name: member.__name__
            for member in members[:-1]
            for name in get_args(member.model_fields["type"].annotation)
        }

        def choose(value: Any) -> str:
            kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            return names.get(str(kind), members[-1].__name__)

        return tagged_union_schema(
            {member.__name__: handler.generate_schema(member) for member in members}, choose
        )


def parse(data: bytes, kind: type[BodyType], *, strict: bool = False) -> BodyType:
    """Parse a body without its unknown fields and values, which `ignored` of the result names.

    strict: refuse them. Raises RequestError, which names the invalid parameter.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    value = _normalize(value)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            raise RequestError("the body has too many invalid fields") from None
        raise _validation_error(value, error.errors(include_url=False)) from error
    body._strict = strict
    for name in _drop_unknown(body):
        body.ignore(name)
    return body


def _drop_unknown(value: Body | list[Any]) -> list[str]:
    """Remove unknown fields, entries and values from a body; return their names."""
    members: Iterable[tuple[str, Any]]
    if isinstance(value, list):
        names = [f"*.{each.text}" for each in value if isinstance(each, UnknownValue)]
        value[:] = [each for each in value if not isinstance(each, UnknownValue)]
        members = (("*", each) for each in value)
    else:
        extra = value.model_extra or {}
        names = [name for name in extra if name not in _EXPECTED]
        extra.clear()
        for name, inner in value.__dict__.items():
            if isinstance(inner, UnknownValue):
                names.append(f"{name}={inner.text}")
                value.__dict__[name] = type(value).model_fields[name].get_default()
        members = value.__dict__.items()
    for name, inner in members:
        if isinstance(inner, Body | list) and not isinstance(inner, OtherPart):
            names += [f"{name}.{each}" for each in _drop_unknown(inner)]
    return names


def _normalize(value: Any) -> Any:
    """Convert floats such as 2.0 to integers, because some languages write integers as floats.

    Half a character, a lone surrogate, becomes U+FFFD: clients cut texts anywhere, and keep them in
    their history. Raises RequestError for deep nesting.
    """
    level, whole = [value], True
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                for name, item in each.items():
                    if isinstance(item, float) and item.is_integer() and abs(item) < _MAX_EXACT:
                        each[name] = int(item)
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, str):
                whole = whole and (each.isascii() or _SURROGATE.search(each) is None)
        level = inner
        if not level:
            text = "" if whole else json.dumps(value, ensure_ascii=False)
            return value if whole else json.loads(_SURROGATE.sub("\ufffd", text))
    raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _validation_error(value: Any, errors: list[ErrorDetails]) -> RequestError:
    error = max(errors, key=lambda error: len(error["loc"]))
    name = ".".join(_param_parts(value, error["loc"]))
    if error["type"] in ("too_short", "string_too_short"):
        message = f"{name} is empty"
    else:
        message = f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return RequestError(on_one_line(message)[:_MAX_MESSAGE], param=name[:_MAX_MESSAGE])


def _param_parts(value: Any, location: Sequence[str | int]) -> list[str]:
    """Return the parts of a pydantic location, without the names of union members."""
    parts: list[str] = []
    for number, part in enumerate(location):
        last = number == len(location) - 1
        if isinstance(value, dict) and (part in value or (last and part not in _UNION_MEMBERS)):
            parts.append(str(part))
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            parts.append(str(part))
            value = value[part]
    return parts


BLANK_LINE = "\n\n"  # between merged texts


def text_of(content: str | list[Any]) -> str:
    """Return the text of a message's content, which may consist of parts."""
    if isinstance(content, str):
        return content
    return BLANK_LINE.join(filter(None, (part.text for part in content)))


def merge_messages(messages: Iterable[Message], param: str) -> list[Message]:
    """Merge consecutive messages of the same role, as chat templates expect.

    Tool results and text after tool calls stay separate. Raises RequestError if all messages are
    system messages. param: the name of the messages in the body.
    """
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        if (
            last is None
            or last.role != message.role
            or message.role == "tool"
            or (last.tool_calls and message.content)
        ):
            turns.append(message)
            continue
        turns[-1] = replace(
            last,
            content=BLANK_LINE.join(text for text in (last.content, message.content) if text),
            thinking=BLANK_LINE.join(text for text in (last.thinking, message.thinking) if text),
            tool_calls=last.tool_calls + message.tool_calls,
        )
    if not any(turn.role != "system" for turn in turns):
        raise invalid(param, "expected a message to answer")
    return turns
