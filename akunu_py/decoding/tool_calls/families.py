"""The formats in which families of models write calls, and which of them a model has.

mlx-lm says it for most: by the name of its own parser of whole calls. For the others, the template
and the vocabulary do. A model whose template says nothing of tools is told of them, and of the
format, by us: see `conversation`.
"""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from akunu_py.decoding.chat_format.conversation import abilities
from akunu_py.decoding.text import channels
from akunu_py.decoding.tool_calls.calls import Calls
from akunu_py.decoding.tool_calls.gemma_format import Gemma
from akunu_py.decoding.tool_calls.json_format import (
    deepseek,
    harmony,
    json_calls,
    keyed_json,
    kimi_k2,
    mistral,
    named_json,
)
from akunu_py.decoding.tool_calls.pythonic_format import pythonic
from akunu_py.decoding.tool_calls.reader import Reader, Reading
from akunu_py.decoding.tool_calls.xml_format import KeyValue, Xml


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id() -> str:
    """Mistral's templates take no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Family:
    """openers: what calls begin with, and what closes them then, "" for nothing. body: reads a call
    between the two, or several. bare: what a call begins with that needs no opener, at the
    beginning of an answer. markers: what else may be a token of its own in a call. dropped: markup
    around the text, which is no part of it.
    """

    name: str
    openers: Mapping[str, str]
    body: Callable[[Reader, Calls], Reading[None]]
    bare: str = ""
    markers: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    new_id: Callable[[], str] = field(default=_long_id)

    @property
    def all_markers(self) -> tuple[str, ...]:
        """All that may be a special token."""
        return tuple(filter(None, (*self.openers, *self.openers.values(), *self.markers)))


def _open_close(name: str, tag: str, body: Callable[[Reader, Calls], Reading[None]]) -> Family:
    return Family(name, {f"<{tag}>": f"</{tag}>"}, body)


_DSML = "｜DSML｜"

# Around what an answer says, and what ends a message.
KIMI_K3_TEXT = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"

HERMES = _open_close("hermes", "tool_call", json_calls)
HARMONY = Family("harmony", {"<|start|>": ""}, harmony)
LLAMA3 = Family("llama3", {"<|python_tag|>": ""}, json_calls, bare="{")

FAMILIES = {
    family.name: family
    for family in (
        HERMES,
        HARMONY,
        LLAMA3,
        # The template shows tools, but not how they are called.
        Family("unknown", HERMES.openers, json_calls, bare="{"),
        _open_close(
            "qwen3_coder",
            "tool_call",
            Xml("<function=", "</function>", "<parameter=", "</parameter>", newlines=True),
        ),
        _open_close(
            "seed",
            "seed:tool_call",
            Xml("<function=", "</function>", "<parameter=", "</parameter>"),
        ),
        _open_close(
            "minimax_m2",
            "minimax:tool_call",
            Xml("<invoke", "</invoke>", "<parameter", "</parameter>", name="name", key="name"),
        ),
        Family(
            "minicpm5",
            {"<function name=": ""},
            Xml("", "</function>", "<param name=", "</param>"),
        ),
        _open_close(
            "muse_spark",
            "atem:function_calls",
            Xml(
                "<atem:invoke",
                "</atem:invoke>",
                "<atem:parameter",
                "</atem:parameter>",
                name="name",
                key="name",
            ),
        ),
        Family(
            "dsml",
            {f"<{_DSML}{tag}>": f"</{_DSML}{tag}>" for tag in ("function_calls", "tool_calls")},
            Xml(
                f"<{_DSML}invoke",
                f"</{_DSML}invoke>",
                f"<{_DSML}parameter",
                f"</{_DSML}parameter>",
                name="name",
                key="name",
                typed=("string", "true"),
            ),
            markers=(_DSML,),
        ),
        Family(
            "kimi_k3",
            {"<|open|>tools<|sep|>": "<|close|>tools<|sep|>"},
            Xml(
                "<|open|>call",
                "<|close|>call<|sep|>",
                "<|open|>argument",
                "<|close|>argument<|sep|>",
                head="<|sep|>",
                name="tool",
                key="key",
                typed=("type", "string"),
            ),
            dropped=KIMI_K3_TEXT,
        ),
        _open_close("glm47", "tool_call", KeyValue()),
        _open_close("longcat", "longcat_tool_call", KeyValue("longcat_")),
        Family(
            "mistral",
            {"[TOOL_CALLS]": ""},
            mistral,
            markers=("[ARGS]", "[CALL_ID]"),
            new_id=_short_id,
        ),
        Family(
            "deepseek",
            {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
            deepseek,
            markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
        Family(
            "kimi_k2",
            {"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"},
            kimi_k2,
            markers=(
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
        ),
        Family(
            "gemma4",
            {"<|tool_call>": "<tool_call|>"},
            Gemma('<|"|>'),
            markers=('<|"|>',),
        ),
        Family(
            "function_gemma",
            {"<start_function_call>": "<end_function_call>"},
            Gemma("<escape>"),
            markers=("<escape>",),
        ),
        Family("pythonic", {"<|tool_call_start|>": "<|tool_call_end|>"}, pythonic),
        Family("phi4", {"<|tool_call|>": "<|/tool_call|>"}, json_calls),
        Family("granite", {"<|tool_call|>": "", "<tool_call>": "</tool_call>"}, json_calls),
        Family("functionary", {"<function=": "</function>"}, named_json),
        Family("apertus", {"<|tools_prefix|>": "<|tools_suffix|>"}, keyed_json),
        _open_close("nemotron", "TOOLCALL", json_calls),
        _open_close("jamba", "tool_calls", json_calls),
        Family("cohere", {"<|START_ACTION|>": "<|END_ACTION|>"}, json_calls),
    )
}

# What mlx-lm's parsers are called, where that differs.
_MLX_NAMES = {"json_tools": "hermes", "laguna": "glm47"}
# What a template holds whose family mlx-lm does not know; the first that fits.
_SIGNS = (
    (_DSML, "dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<seed:tool_call>", "seed"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<TOOLCALL>", "nemotron"),
    ("<|START_ACTION|>", "cohere"),
    ("<|tools_prefix|>", "apertus"),
    ("<function=", "functionary"),
    ("<|python_tag|>", "llama3"),
    ("<tool_calls>", "jamba"),
    ("<tool_call>", "hermes"),
    ('"parameters": dictionary', "llama3"),
)
_CHAT_TEMPLATES = {"deepseek_v32": "dsml"}  # of mlx-lm


def family_of(tokenizer: Any) -> Family:
    """The format in which a model that has this tokenizer and its template calls tools."""
    known = abilities(tokenizer)
    if not known.tools:
        return HERMES
    if channels.channels_of(tokenizer) is channels.HARMONY:
        return HARMONY
    own = str(getattr(tokenizer._chat_template, "__module__", "")).rpartition(".")[2]
    if own in _CHAT_TEMPLATES:
        return FAMILIES[_CHAT_TEMPLATES[own]]
    parser = str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
    if (name := _MLX_NAMES.get(parser, parser)) in FAMILIES:
        return FAMILIES[name]
    for sign, name in _SIGNS:
        if sign in known.template:
            return FAMILIES[name]
    return FAMILIES["unknown"]
