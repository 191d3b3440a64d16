"""Tool calls in the markup of each family's templates, and the text that no value may contain."""

import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from akunu_py.engine.events import (
    Event,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)

Call = tuple[str, dict[str, Any]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """Return a value as it stands between tags."""
    return value if isinstance(value, str) else dumped(value)


def sectioned(begin: str, call: str, end: str, between: str = "") -> Callable[[list[Call]], str]:
    return lambda calls: (
        begin
        + between.join(
            call.replace("NAME", n).replace("INDEX", str(i)).replace("JSON", dumped(a))
            for i, (n, a) in enumerate(calls)
        )
        + end
    )


def array(
    begin: str, end: str, name: str = "name", arguments: str = "arguments"
) -> Callable[[list[Call]], str]:
    call = f'{{"{name}": "NAME", "{arguments}": JSON}}'
    return sectioned(f"{begin}[", call, f"]{end}", ", ")


SINGLE = '{"name": "NAME", "arguments": JSON}'
LLAMA3 = '{"name": "NAME", "parameters": JSON}'
llama3 = sectioned("", LLAMA3, "", "; ")


def markup(
    call: str, parameter: str, around: tuple[str, str], between: str = "\n"
) -> Callable[[list[Call]], str]:
    """call, parameter: format strings of (name, inner) and (key, value)."""

    def write(calls: list[Call]) -> str:
        inner = [
            call.format(n, "".join(parameter.format(k, bare(v)) for k, v in a.items()))
            for n, a in calls
        ]
        return f"{around[0]}{between}{between.join(inner)}{between}{around[1]}"

    return write


def each(
    begin: str, end: str, write: Callable[[list[Call]], str], between: str = "\n"
) -> Callable[[list[Call]], str]:
    return lambda calls: between.join(f"{begin}{write([call])}{end}" for call in calls)


def gemma(quote: str) -> Callable[[list[Call]], str]:
    def value(found: Any) -> str:
        if isinstance(found, str):
            return f"{quote}{found}{quote}"
        if isinstance(found, list):
            return f"[{','.join(map(value, found))}]"
        if isinstance(found, dict):
            members = sorted(found.items(), key=lambda item: item[0].lower())
            return f"{{{','.join(f'{key}:{value(each)}' for key, each in members)}}}"
        return "None" if found is None else dumped(found)

    return lambda calls: f"call:{calls[0][0]}{value(calls[0][1])}"


def pythonic(calls: list[Call]) -> str:
    """Write calls as LFM2.5, with strings in single quotes where they need no escapes."""

    def value(found: Any) -> str:
        if isinstance(found, str) and not re.search(r"['\\\x00-\x08\x0b-\x1f]", found):
            return f"'{found}'"
        return dumped(found) if isinstance(found, dict) else repr(found)

    listed = (f"{n}({', '.join(f'{k}={value(v)}' for k, v in a.items())})" for n, a in calls)
    return f"<|tool_call_start|>[{', '.join(listed)}]<|tool_call_end|>"


def dsml(calls: list[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        return (
            f'<｜DSML｜parameter name="{key}" string="{kind}">{bare(value)}</｜DSML｜parameter>\n'
        )

    blocks = (
        f'<｜DSML｜invoke name="{n}">\n'
        + "".join(itertools.starmap(parameter, a.items()))
        + "</｜DSML｜invoke>\n"
        for n, a in calls
    )
    return f"<｜DSML｜function_calls>\n{''.join(blocks)}</｜DSML｜function_calls>"


def kimi_k3(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kinds = {bool: "boolean", str: "string", dict: "object", list: "array", type(None): "null"}
        kind = kinds.get(type(value), "number")
        head = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
        return f"{head}{bare(value)}<|close|>argument<|sep|>"

    blocks = (
        f'<|open|>call tool="{n}" index="{i}"<|sep|>'
        + "".join(itertools.starmap(argument, a.items()))
        + "<|close|>call<|sep|>"
        for i, (n, a) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{''.join(blocks)}<|close|>tools<|sep|>"


MINIMAX_M3 = "]<]minimax[>["
FUNCTION = "<function={0}>\n{1}</function>", "<parameter={0}>\n{1}\n</parameter>\n"
INVOKE = '<{0}invoke name="{{0}}">\n{{1}}</{0}invoke>'
INVOKE_PARAMETER = '<{0}parameter name="{{0}}">{{1}}</{0}parameter>\n'
PAIRS = "<{0}arg_key>{{0}}</{0}arg_key>\n<{0}arg_value>{{1}}</{0}arg_value>\n"
HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON"
)
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_31 = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
KIMI_K2 = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_K2_CALL = (
    "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>"
)


def tagged(begin: str, end: str, call: str, parameter: str) -> Callable[[list[Call]], str]:
    return each(begin, end, markup(call, parameter, ("", ""), ""))


# The family, the writer of calls, and what no unquoted value may contain.
Written = tuple[str, Callable[[list[Call]], str], tuple[str, ...]]
EXAMPLES: dict[str, Written] = {
    "hermes": ("hermes", sectioned("", f"<tool_call>\n{SINGLE}\n</tool_call>", "", "\n"), ()),
    "hermes array": ("hermes", array("<tool_call>", "</tool_call>"), ()),
    "llama3": ("llama3", llama3, ()),
    "llama3 tag": ("llama3", sectioned("", f"<|python_tag|>{LLAMA3}", "", "\n"), ()),
    "unknown": ("unknown", llama3, ()),
    "mistral": ("mistral", sectioned("", "[TOOL_CALLS]NAME[ARGS]JSON", ""), ()),
    "mistral once": ("mistral", sectioned("[TOOL_CALLS]", "NAME[ARGS]JSON", "", " "), ()),
    "mistral array": ("mistral", array("[TOOL_CALLS] ", ""), ()),
    "harmony": ("harmony", sectioned("", HARMONY, ""), ()),
    "deepseek v3": ("deepseek", sectioned(DEEPSEEK[0], DEEPSEEK_3, DEEPSEEK[1], "\n"), ()),
    "deepseek v3.1": ("deepseek", sectioned(DEEPSEEK[0], DEEPSEEK_31, DEEPSEEK[1]), ()),
    "kimi_k2": ("kimi_k2", sectioned(KIMI_K2[0], KIMI_K2_CALL, KIMI_K2[1]), ()),
    "phi4": ("phi4", array("<|tool_call|>", "<|/tool_call|>"), ()),
    "granite": ("granite", array("<|tool_call|>", ""), ()),
    "nemotron": ("nemotron", array("<TOOLCALL>", "</TOOLCALL>"), ()),
    "jamba": ("jamba", array("<tool_calls>", "</tool_calls>"), ()),
    "functionary": ("functionary", sectioned("", "<function=NAME>JSON</function>", ""), ()),
    "functionary_v3.2": ("functionary_v3.2", sectioned("", ">>>NAME\nJSON", ""), ()),
    "apertus": (
        "apertus", sectioned("<|tools_prefix|>[", '{"NAME": JSON}', "]<|tools_suffix|>", ", "), ()
    ),
    "cohere": (
        "cohere", array("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"), ()
    ),
    "qwen3_coder": (
        "qwen3_coder", tagged("<tool_call>\n", "\n</tool_call>", *FUNCTION), ("</parameter>",)
    ),
    "qwen3_coder bare": (
        "qwen3_coder", each("", "\n</tool_call>", markup(*FUNCTION, ("", ""), "")),
        ("</parameter>",),
    ),
    **{
        f"hy3{suffix}": (
            "hy3",
            markup(f"<tool_call{suffix}>{{0}}<tool_sep{suffix}>\n{{1}}</tool_call{suffix}>",
                   f"<arg_key{suffix}>{{0}}</arg_key{suffix}>\n"
                   f"<arg_value{suffix}>{{1}}</arg_value{suffix}>\n",
                   (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")),
            (f"</arg_value{suffix}>",),
        )
        for suffix in ("", ":opensource")
    },
    "solar_open": (
        "solar_open",
        sectioned("<|tool_calls|>", "<|tool_call:begin|>call00000INDEX<|tool_call:name|>NAME"
                  "<|tool_call:args|>JSON<|tool_call:end|>", "<|calls|>"),
        (),
    ),
    "solar_open2": (
        "solar_open2",
        tagged("<|tool_call:start|>", "<|tool_call:end|>", "{0}\n{1}",
               "<|tool_arg:start|>{0}<|tool_arg:value|>{1}<|tool_arg:end|>\n"),
        ("<|tool_arg:end|>",),
    ),
    "gigachat3": ("gigachat3", sectioned("", f"function call<|role_sep|>\n{SINGLE}", "", "\n"), ()),
    "gigachat3.1": ("gigachat3", sectioned("", f"<|function_call|>{SINGLE}", "", "\n"), ()),
    "seed": (
        "seed",
        tagged("<seed:tool_call>\n", "\n</seed:tool_call>", FUNCTION[0],
               "<parameter={0}>{1}</parameter>\n"),
        ("</parameter>",),
    ),
    "minimax_m2": (
        "minimax_m2",
        markup(INVOKE.format(""), INVOKE_PARAMETER.format(""),
               ("<minimax:tool_call>", "</minimax:tool_call>")),
        ("</parameter>",),
    ),
    "minimax_m3": (
        "minimax_m3",
        markup(f'{MINIMAX_M3}<invoke name="{{0}}">{{1}}{MINIMAX_M3}</invoke>',
               f"{MINIMAX_M3}<{{0}}>{{1}}{MINIMAX_M3}</{{0}}>",
               (f"{MINIMAX_M3}<tool_call>", f"{MINIMAX_M3}</tool_call>")),
        (MINIMAX_M3,),
    ),
    "muse_spark": (
        "muse_spark",
        markup(INVOKE.format("atem:"), INVOKE_PARAMETER.format("atem:"),
               ("<atem:function_calls>", "</atem:function_calls>")),
        ("</atem:parameter>",),
    ),
    "minicpm5": (
        "minicpm5",
        tagged("", "", '<function name="{0}">{1}</function>', '<param name="{0}">{1}</param>'),
        ("</param>",),
    ),
    "dsml": ("dsml", dsml, ("</｜DSML｜parameter>",)),
    "kimi_k3": ("kimi_k3", kimi_k3, ("<|close|>argument<|sep|>",)),
    "glm47": (
        "glm47", tagged("<tool_call>", "</tool_call>", "{0}\n{1}", PAIRS.format("")),
        ("</arg_value>",),
    ),
    "longcat": (
        "longcat",
        tagged("<longcat_tool_call>", "</longcat_tool_call>", "{0}\n{1}", PAIRS.format("longcat_")),
        ("</longcat_arg_value>",),
    ),
    "gemma4": ("gemma4", each("<|tool_call>", "<tool_call|>", gemma('<|"|>'), ""), ('<|"|>',)),
    "function_gemma": (
        "function_gemma",
        each("<start_function_call>", "<end_function_call>", gemma("<escape>"), ""), ("<escape>",),
    ),
    "pythonic": ("pythonic", pythonic, ()),
}  # fmt: skip


def calls_in(events: Iterable[Event]) -> tuple[list[Call], str]:
    """Return the complete calls and the text of an answer."""
    calls, shown, name, arguments = list[Call](), "", "", ""
    for event in events:
        match event:
            case TextDelta():
                shown += event.text
            case ToolCallStarted():
                name, arguments = event.name, ""
            case ToolCallArguments():
                arguments += event.text
            case ToolCallFinished():
                calls.append((name, json.loads(arguments)))
    return calls, shown
