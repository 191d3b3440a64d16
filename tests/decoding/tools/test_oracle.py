"""Whole calls are what mlx-lm's own parsers find, where values leave no room for opinions."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import pytest
from mlx_lm import tool_parsers

from akunu_py.decoding.events import ToolCallArguments, ToolCallStarted
from akunu_py.decoding.tools.formats import FORMATS
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser
from akunu_py.types import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "in": {"type": "array"},
    },
}
TOOLS = [Tool("weather", "", SCHEMA)]
DEFINED = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
# What a model writes behind the opener of its family, up to what closes it.
WRITTEN = {
    "json_tools": '\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n',
    "mistral": 'weather[ARGS]{"city": "Oslo", "days": 3, "in": [1, "a"]}',
    "kimi_k2": "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|>',
    "kimi_k3": '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key="days" '
    'type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>',
    "qwen3_coder": "\n<function=weather>\n<parameter=city>\nOslo\nNorway\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=in>\n[1, 2]\n</parameter>\n</function>",
    "glm47": "weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    "longcat": "weather\n<longcat_arg_key>in</longcat_arg_key>\n"
    "<longcat_arg_value>[1, 2]</longcat_arg_value>\n",
    "minimax_m2": '\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n',
    "minicpm5": '"weather"><param name="city"><![CDATA[a < b]]></param>'
    '<param name="days">3</param></function>',
    "muse_spark": '\n<atem:invoke name="weather">\n<atem:parameter name="city">Oslo'
    '</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n',
    "gemma4": 'call:weather{city:<|"|>Oslo, "N"<|"|>,days:3,in:[1,{a:<|"|>b<|"|>}]}',
    "function_gemma": "call:weather{city:<escape>Oslo<escape>,days:3}",
    "pythonic": '[weather(city="Oslo, N", days=3, in=[1, {"a": true}])]'.replace("in=", "at="),
}


def test_every_parser_of_mlx_lm_is_met() -> None:
    names = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}
    assert names - {"laguna"} == set(WRITTEN)  # that one is glm47 again


@pytest.mark.parametrize("name", WRITTEN)
def test_whole_calls(name: str) -> None:
    theirs: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    found = theirs.parse_tool_call(WRITTEN[name], DEFINED)
    [found] = found if isinstance(found, list) else [found]
    parser = ToolCallParser(FORMATS["hermes" if name == "json_tools" else name], TOOLS)
    end = "" if name == "minicpm5" else theirs.tool_call_end
    events = [*parser.add(theirs.tool_call_start + WRITTEN[name] + end), *parser.finish()]
    begun, arguments, _ = events
    assert isinstance(begun, ToolCallStarted)
    assert isinstance(arguments, ToolCallArguments)
    assert begun.name == found["name"]
    assert json.loads(arguments.text) == found["arguments"]
