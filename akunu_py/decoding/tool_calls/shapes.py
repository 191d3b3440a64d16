"""How a family writes calls, to hold it to that: what comes before, between and behind them, and
in which way the arguments stand inside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from akunu_py.decoding.tool_calls.families import KIMI_K3_TEXT, Family
from akunu_py.decoding.tool_calls.gemma_format import Gemma
from akunu_py.decoding.tool_calls.xml_format import KeyValue, Xml


@dataclass(frozen=True, slots=True)
class Tags:
    """Around a parameter in markup. string, other: what begins a value of that type; KEY stands for
    the name, TYPE for the type. end: what no string can hold, because it ends the value. line: what
    is between a value and that. behind: what follows."""

    string: str
    other: str
    end: str
    line: str = ""
    behind: str = "\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """before, behind: all calls; between: two of them. call: a call, in which NAME stands for the
    function, ARGUMENTS for a JSON object, or for parameters, and INDEX for a number. tags: of the
    parameters; None where the arguments are JSON. opener: what no text holds that is no call.
    text_first: what may be written before a call that must be made. text_head: what begins a text
    behind that. around: what may begin and end a text before all calls, and what may end the
    answer. notation: how ARGUMENTS are written:
    "marked" as Gemma does, with `quote` around strings, "python" as arguments in brackets.
    """

    before: str
    call: str
    between: str = "\n"
    behind: str = ""
    tags: Tags | None = None
    opener: str = ""
    text_first: tuple[str, str] | None = None
    text_head: str = ""
    around: tuple[str, str, str] | None = None
    notation: Literal["json", "marked", "python"] = "json"
    quote: str = ""


_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_LISTED = ("phi4", "granite", "nemotron", "jamba")


def shape_of(family: Family, template: str) -> Shape:
    """template: the model's own, which tells older models of a family from newer ones."""
    name, (opener, closer) = family.name, next(iter(family.openers.items()))
    if name in ("hermes", "unknown"):
        return Shape("", f"{opener}\n{_JSON}\n{closer}", opener=opener)
    if name == "llama3":
        return Shape("", '{"name": "NAME", "parameters": ARGUMENTS}', "; ")
    if name in _LISTED:
        return Shape(f"{opener}[", _JSON, ", ", f"]{closer}", opener=opener)
    if name == "functionary":
        return Shape("", f"{opener}NAME>ARGUMENTS{closer}", "", opener=opener)
    if name == "apertus":
        return Shape(f"{opener}[", '{"NAME": ARGUMENTS}', ", ", f"]{closer}", opener=opener)
    if name == "cohere":
        call = '{"tool_name": "NAME", "parameters": ARGUMENTS}'
        return Shape(f"{opener}[", call, ", ", f"]{closer}", opener=opener)
    if name == "mistral" and "[ARGS]" in template:
        return Shape("", f"{opener}NAME[ARGS]ARGUMENTS", "", opener=opener)
    if name == "mistral":
        return Shape(f"{opener} [", _JSON, ", ", "]", opener=opener)
    if name == "deepseek":
        begin, middle, end = _DEEPSEEK
        fenced = f"{begin}function{middle}NAME\n```json\nARGUMENTS\n```{end}"
        plain = f"{begin}NAME{middle}ARGUMENTS{end}"
        old = "```json" in template
        return Shape(opener, fenced if old else plain, "\n" * old, closer, opener=opener)
    if name == "kimi_k2":
        call = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS"
        return Shape(opener, f"{call}<|tool_call_end|>", "", closer, opener=opener)
    if name == "harmony":
        call = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"
        thought = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        return Shape(
            "",
            call,
            "<|call|><|start|>assistant",
            text_first=thought,
            text_head="<|channel|>final<|message|>",
        )
    if isinstance(family.body, Gemma):
        call, quote = f"{opener}call:NAMEARGUMENTS{closer}", family.body.quote
        return Shape("", call, "", opener=opener, notation="marked", quote=quote)
    if name == "pythonic":
        call = "NAMEARGUMENTS"
        return Shape(f"{opener}[", call, ", ", f"]{closer}", opener=opener, notation="python")
    if name == "kimi_k3":
        return _kimi_k3(opener, closer)
    return _markup(family, opener, closer)


def _kimi_k3(opener: str, closer: str) -> Shape:
    head = '<|open|>argument key="KEY" type='
    end = "<|close|>argument<|sep|>"
    tags = Tags(f'{head}"string"<|sep|>', f'{head}"TYPE"<|sep|>', end, behind="")
    call = '<|open|>call tool="NAME" index="INDEX"<|sep|>ARGUMENTS<|close|>call<|sep|>'
    return Shape(opener, call, "", closer, tags, opener, around=KIMI_K3_TEXT)


def _markup(family: Family, opener: str, closer: str) -> Shape:
    body = family.body
    if isinstance(body, KeyValue):
        key = f"<{body.tag}arg_key>KEY</{body.tag}arg_key>\n<{body.tag}arg_value>"
        tags = Tags(key, key, f"</{body.tag}arg_value>")
        return Shape("", f"{opener}NAME\nARGUMENTS{closer}", tags=tags, opener=opener)
    assert isinstance(body, Xml)
    name = f' {body.name}="NAME"' if body.name else "NAME"
    key = f' {body.key}="KEY"' if body.key else "KEY"
    line = "\n" if body.newlines else ""
    kinds = ("", "")
    if body.typed:
        kinds = f' {body.typed[0]}="{body.typed[1]}"', f' {body.typed[0]}="false"'
    string, other = (f"{body.parameter}{key}{kind}{body.head}{line}" for kind in kinds)
    tags = Tags(string, other, body.parameter_end, line)
    call = f"{body.call}{name}{body.head}\nARGUMENTS{body.call_end}"
    if not closer:  # the opener is part of the call
        quoted = opener + '"NAME"' + f"{body.head}ARGUMENTS{body.call_end}"
        return Shape("", quoted, tags=_quoted(tags), opener=opener)
    if body.name:
        # A line ends with a call: one of two texts that begin alike would be lost.
        return Shape(f"{opener}\n", f"{call}\n", "", closer, tags, opener)
    return Shape("", f"{opener}\n{call}\n{closer}", tags=tags, opener=opener)


def _quoted(tags: Tags) -> Tags:
    string, other = (each.replace("KEY", '"KEY"') for each in (tags.string, tags.other))
    return replace(tags, string=string, other=other, behind="")
