"""The table of tool-call formats. A new format is one more entry of `FORMATS`.

An entry says how to read calls (`syntax`), how to write them (`layout`), and which models use the
format. `tool_call_parser`, the grammar of forced calls (`constraint/tool_calls`) and the rendering
of earlier calls (`rendering`) use the table.
"""

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from akunu_py.engine.tools.syntaxes import (
    CallLayout,
    Elements,
    Gemma,
    KeyValue,
    NamedJson,
    Syntax,
    Xml,
    json_calls,
    keyed_json,
    mistral,
    pythonic,
)


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id(call_id: str, name: str, index: int) -> str:
    """Mistral's templates accept nine letters and digits only."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _kimi_id(call_id: str, name: str, index: int) -> str:
    """Kimi's template prints the id where the name belongs."""
    known = not name or re.fullmatch(r"functions\..+:\d+", call_id)
    return call_id if known else f"functions.{name}:{index}"


def _solar_id(call_id: str, name: str, index: int) -> str:
    """Return an id of ten letters and digits, as the model writes them."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models calls tools."""

    name: str
    openers: Mapping[str, str]  # opener of calls: closer, "" for none
    syntax: Syntax  # reads the text between opener and closer
    layout: CallLayout
    template_layouts: Mapping[str, CallLayout] = field(default_factory=dict)  # by a text in it
    # How `rendering.format_of` finds a model's format.
    aliases: tuple[str, ...] = ()  # further names of mlx-lm's tool parsers and chat templates
    signature: str = ""  # selects the format if the chat template contains it
    weak_signature: str = ""  # like `signature`, but any `signature` takes precedence
    token: str = ""  # vocabulary entry that selects the format if the template renders no calls
    # Details of the parser.
    bare_opener: str = ""  # begins a call without an opener at the beginning of an answer
    bare_call: str = ""  # begins a call without an opener anywhere, if the request has the tool
    opened: bool = False  # the prompt ends with the opener; `layout.text_opener` begins a text
    markers: tuple[str, ...] = ()  # further special tokens in a call
    text_markup: tuple[str, ...] = ()  # removed from the text
    new_id: Callable[[], str] = _long_id
    history_id: Callable[[str, str, int], str] | None = None  # id that the template accepts

    @property
    def all_markers(self) -> tuple[str, ...]:
        """All texts that may be special tokens."""
        return tuple(filter(None, (*self.openers, *self.openers.values(), *self.markers)))

    def layout_for(self, template: str) -> CallLayout:
        """Return the layout that fits a chat template; older models of a family have another."""
        found = (layout for part, layout in self.template_layouts.items() if part in template)
        return next(found, self.layout)


_SOLAR_ARGUMENT = ("start", "value", "end")
_HY3 = KeyValue(suffixes=("", ":opensource"))
_MINIMAX_M3 = "]<]minimax[>["
_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_DSML = "｜DSML｜"
_HARMONY = NamedJson(
    header="<|channel|>commentary to=functions.NAME <|constrain|>json",
    name=r"\A[^{]*?to=functions\.([^\s<{]+)[^{]*\Z",
    separator="<|message|>",
)


def _derived(
    name: str,
    openers: Mapping[str, str],
    syntax: NamedJson | Xml | Elements | KeyValue | Gemma,
    text_markup: tuple[str, str, str] | None = None,
    **more: Any,
) -> ToolFormat:
    """Return a format with the layout of its syntax. text_markup: see `CallLayout`."""
    layout = replace(syntax.layout(*next(iter(openers.items()))), text_markup=text_markup)
    return ToolFormat(name, openers, syntax, layout, text_markup=text_markup or (), **more)


def _invoke(prefix: str = "", typed: tuple[str, str, str] | None = None) -> Xml:
    """Return the syntax with `<invoke name=...>` and `<parameter name=...>`."""
    invoke, parameter = f"{prefix}invoke", f"{prefix}parameter"
    tags = f"<{invoke}", f"</{invoke}>", f"<{parameter}", f"</{parameter}>"
    return Xml(*tags, name="name", key="name", typed=typed)


def _array_format(
    name: str,
    openers: Mapping[str, str],
    call: str = _JSON,
    syntax: Syntax = json_calls,
    notation: Literal["json", "python"] = "json",
    **more: Any,
) -> ToolFormat:
    opener, closer = next(iter(openers.items()))
    layout = CallLayout(f"{opener}[", call, ", ", f"]{closer}", opener=opener, notation=notation)
    return ToolFormat(name, openers, syntax, layout, **more)


HERMES = ToolFormat(
    "hermes",
    {"<tool_call>": "</tool_call>"},
    json_calls,
    CallLayout("", f"<tool_call>\n{_JSON}\n</tool_call>", opener="<tool_call>"),
    aliases=("json_tools",),
    signature="<tool_call>",
)
# For templates that show tools but not how they are called.
UNKNOWN = ToolFormat("unknown", HERMES.openers, json_calls, HERMES.layout, bare_opener="{")
HARMONY = ToolFormat(
    "harmony",
    {"<|start|>": ""},
    _HARMONY,
    CallLayout(
        "",
        _HARMONY.call,
        "<|call|><|start|>assistant",
        text_before=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        text_opener="<|channel|>final<|message|>",
    ),
)

# In the order in which signatures are searched.
_TABLE = (
    _derived(
        "dsml",
        {f"<{_DSML}{tag}>": f"</{_DSML}{tag}>" for tag in ("function_calls", "tool_calls")},
        _invoke(_DSML, typed=("string", "true", "false")),
        aliases=("deepseek_v32",),
        signature=_DSML,
        markers=(_DSML,),
    ),
    _derived(
        "deepseek",
        {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
        NamedJson(
            begin="<｜tool▁call▁begin｜>",
            separator="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            fenced=True,
        ),
        template_layouts={
            "```json": CallLayout(  # V3 and R1
                prefix="<｜tool▁calls▁begin｜>",
                call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
                "```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
                suffix="<｜tool▁calls▁end｜>",
                opener="<｜tool▁calls▁begin｜>",
            )
        },
        signature="<｜tool▁calls▁begin｜>",
        markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    _derived(
        "minimax_m3",
        {f"{_MINIMAX_M3}<tool_call>": f"{_MINIMAX_M3}</tool_call>"},
        Elements(_MINIMAX_M3),
        signature=_MINIMAX_M3,
        markers=(_MINIMAX_M3,),
    ),
    _derived(
        "seed",
        {"<seed:tool_call>": "</seed:tool_call>"},
        Xml("<function=", "</function>", "<parameter=", "</parameter>"),
        signature="<seed:tool_call>",
    ),
    _array_format("phi4", {"<|tool_call|>": "<|/tool_call|>"}, signature="<|/tool_call|>"),
    _array_format(
        "granite",
        {"<|tool_call|>": "", "<tool_call>": "</tool_call>"},
        signature="<|tool_call|>",
        token="<|tool_call|>",
    ),
    _array_format("nemotron", {"<TOOLCALL>": "</TOOLCALL>"}, signature="<TOOLCALL>"),
    _array_format(
        "cohere",
        {"<|START_ACTION|>": "<|END_ACTION|>"},
        '{"tool_name": "NAME", "parameters": ARGUMENTS}',
        signature="<|START_ACTION|>",
    ),
    _array_format(
        "apertus",
        {"<|tools_prefix|>": "<|tools_suffix|>"},
        '{"NAME": ARGUMENTS}',
        keyed_json,
        signature="<|tools_prefix|>",
    ),
    ToolFormat(
        "functionary",
        {"<function=": "</function>"},
        NamedJson(">"),
        CallLayout("", "<function=NAME>ARGUMENTS</function>", "", opener="<function="),
        signature="<function=",
    ),
    ToolFormat(
        "functionary_v3.2",
        {">>>": ""},
        NamedJson("\n", begin=">>>", text_name="all"),
        CallLayout("", "NAME\nARGUMENTS", ">>>", text_opener="all\n"),
        signature=">>>all",
        bare_call=">>>",
        opened=True,
    ),
    ToolFormat(
        "llama3",
        {"<|python_tag|>": ""},
        json_calls,
        CallLayout("", '{"name": "NAME", "parameters": ARGUMENTS}', "; "),
        signature="<|python_tag|>",
        weak_signature='"parameters": dictionary',
        bare_opener="{",
    ),
    _derived(
        "hy3",
        {"<tool_calls>": "</tool_calls>", "<tool_calls:opensource>": "</tool_calls:opensource>"},
        _HY3,
        template_layouts={
            ":opensource>": _HY3.layout("<tool_calls:opensource>", "</tool_calls:opensource>")
        },
        signature="<tool_sep",
        markers=tuple(
            f"<{end}{name}{suffix}>"
            for name in ("tool_call", "tool_sep", "arg_key", "arg_value")
            for end in ("", "/")
            for suffix in _HY3.suffixes
        ),
    ),
    _derived(
        "solar_open",
        {"<|tool_calls|>": "<|calls|>"},
        NamedJson(
            begin="<|tool_call:begin|>",
            header="call00000INDEX<|tool_call:name|>NAME",
            name=r"<\|tool_call:name\|>(.*)",
            separator="<|tool_call:args|>",
            end="<|tool_call:end|>",
        ),
        signature="<|tool_call:begin|>",
        markers=tuple(f"<|tool_call:{each}|>" for each in ("begin", "name", "args", "end")),
        history_id=_solar_id,
    ),
    _derived(
        "solar_open2",
        {"<|tool_call:start|>": ""},
        Xml(
            call="",
            call_end="<|tool_call:end|>",
            parameter="<|tool_arg:start|>",
            parameter_end="<|tool_arg:end|>",
            head="\n",
            parameter_head="<|tool_arg:value|>",
        ),
        signature="<|tool_call:start|>",
        markers=("<|tool_call:end|>", *(f"<|tool_arg:{each}|>" for each in _SOLAR_ARGUMENT)),
    ),
    ToolFormat(
        "gigachat3",
        {"function call<|role_sep|>\n": "", "<|function_call|>": ""},
        json_calls,
        CallLayout("", f"function call<|role_sep|>\n{_JSON}", opener="function call<|role_sep|>\n"),
        template_layouts={
            "<|function_call|>": CallLayout(
                "", f"<|function_call|>{_JSON}", opener="<|function_call|>"
            )
        },
        signature="function call<|role_sep|>",
        weak_signature="<|function_call|>",
        markers=("<|role_sep|>",),
        text_markup=("<|message_sep|>",),
    ),
    _array_format("jamba", {"<tool_calls>": "</tool_calls>"}, signature="<tool_calls>"),
    HERMES,
    UNKNOWN,
    HARMONY,
    _derived(
        "qwen3_coder",
        {"<tool_call>": "</tool_call>"},
        Xml("<function=", "</function>", "<parameter=", "</parameter>", newlines=True),
        bare_call="<function=",
    ),
    _derived("minimax_m2", {"<minimax:tool_call>": "</minimax:tool_call>"}, _invoke()),
    _derived(
        "minicpm5",
        {"<function name=": ""},
        Xml("", "</function>", "<param name=", "</param>", quote='"', separator=""),
    ),
    _derived("muse_spark", {"<atem:function_calls>": "</atem:function_calls>"}, _invoke("atem:")),
    _derived(
        "kimi_k3",
        {"<|open|>tools<|sep|>": "<|close|>tools<|sep|>"},
        Xml(
            call="<|open|>call",
            call_end="<|close|>call<|sep|>",
            parameter="<|open|>argument",
            parameter_end="<|close|>argument<|sep|>",
            head="<|sep|>",
            name="tool",
            key="key",
            typed=("type", "string", "TYPE"),
            separator="",
            extra=' index="INDEX"',
        ),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    _derived("glm47", {"<tool_call>": "</tool_call>"}, KeyValue(), aliases=("laguna",)),
    _derived("longcat", {"<longcat_tool_call>": "</longcat_tool_call>"}, KeyValue("longcat_")),
    ToolFormat(
        "mistral",
        {"[TOOL_CALLS]": ""},
        mistral,
        CallLayout("[TOOL_CALLS] [", _JSON, ", ", "]", opener="[TOOL_CALLS]"),
        template_layouts={
            "[ARGS]": CallLayout("", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", opener="[TOOL_CALLS]")
        },
        markers=("[ARGS]", "[CALL_ID]"),
        new_id=lambda: uuid.uuid4().hex[:9],
        history_id=_mistral_id,
    ),
    _derived(
        "kimi_k2",
        {"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"},
        NamedJson(
            begin="<|tool_call_begin|>",
            header="functions.NAME:INDEX",
            name=r"\A\s*(?:functions\.)?(.+?)(?::\d+)?\s*\Z",
            separator="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
        ),
        markers=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        history_id=_kimi_id,
    ),
    _derived("gemma4", {"<|tool_call>": "<tool_call|>"}, Gemma('<|"|>'), markers=('<|"|>',)),
    _derived(
        "function_gemma",
        {"<start_function_call>": "<end_function_call>"},
        Gemma("<escape>"),
        markers=("<escape>",),
    ),
    _array_format(
        "pythonic",
        {"<|tool_call_start|>": "<|tool_call_end|>"},
        "NAMEARGUMENTS",
        pythonic,
        notation="python",
        token="<|tool_call_start|>",
    ),
)
FORMATS = {each.name: each for each in _TABLE}
