"""Tools, calls and results in prompts, by the habits of chat templates."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from akunu_py.engine.engine import Engine
from akunu_py.engine.tools.rendering import fold_late_system, render, text_header
from akunu_py.engine.tools.tool_call_parser import parser_for
from akunu_py.types import Message, Tool, ToolCall

WEATHER = Tool("weather", "Says it.", {"type": "object", "properties": {"city": {}}})
TOOLS = (WEATHER, Tool("now"))
CALLS = (ToolCall("weather", '{"city": "Ås"}', "call_1"), ToolCall("now", "{}", "call_2"))
REQUESTED = (Message("system", "Be brief."), Message("user", "Rain?"))
TALK = (
    *REQUESTED, Message("assistant", "", thinking="Hm.", tool_calls=CALLS),
    Message("tool", "wet", tool_call_id="call_1"), Message("tool", "noon", tool_call_id="call_2"),
)  # fmt: skip

# What real templates do with tools, one habit each.
ALL = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
TOOLED = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + ALL
CALLED = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} ARGUMENTS]{% endfor %}{% endfor %}"
)
OBJECT = TOOLED + CALLED.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
ITEMS = TOOLED + CALLED.replace(
    "ARGUMENTS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
TEXT = TOOLED + CALLED.replace("{{ c.function.name }} ARGUMENTS", "{{ c.function.arguments + '' }}")
SINGLE = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one at a time') }}{% endif %}{% endfor %}" + OBJECT
)
SHORT_IDS = OBJECT.replace(
    "[{{",
    "[TOOL_CALLS]{% if c.id | length != 9 %}{{ raise_exception('9!') }}{% endif %}{{ c.id }}[{{",
).replace("{{ '<' + m.role", "{{ m.tool_call_id or '' }}{{ '<' + m.role")
KIMI = OBJECT.replace("[{{ c.function.name", "<|tool_calls_section_begin|>{{ c.id")
HARMONY = OBJECT.replace(
    "{{ '<' + m.role",
    "{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.thinking or '' }}{{ '<' + m.role",
)
NAMED = OBJECT.replace("{{ '<' + m.role", "{{ m.name or '' }}{{ '<' + m.role")
FIRST_SYSTEM = (  # as in Qwen 3.5
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
ALTERNATING = (  # as in Gemma and Mistral
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in turns %}{% if m.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
IGNORES = ALL + "{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + IGNORES
UNCALLED = OBJECT.replace("m.tool_calls", "m.nothing")
REPR = OBJECT.replace("{{ t | tojson }}", "{{ t }}")  # definitions as Python writes them


class Templated:
    """A tokenizer with nothing but a template."""

    _chat_template = tool_parser = None
    has_own_renderer = has_thinking = False
    has_chat_template = True
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, template: str, token: str = "") -> None:
        self._template, self.token = template, token

    def get_chat_template(self, tools: Any = None) -> str:
        return self._template

    @property
    def backend_tokenizer(self) -> Any:
        return self

    def token_to_id(self, text: str) -> int | None:
        return 0 if text == self.token else None


def rendered(
    template: str, messages: tuple[Message, ...] = TALK, tools: Any = TOOLS, token: str = ""
) -> str:
    return render(Templated(template, token), messages, tools, "m")


@pytest.mark.parametrize(("template", "called"), [
    (OBJECT, '[weather {"city": "Ås"}][now {}]'),
    (TEXT, '[{"city": "Ås"}][{}]'),
    (KIMI, '<|tool_calls_section_begin|>functions.weather:0 {"city": "Ås"}'),
    (HARMONY, '<user>Rain?Hm.<assistant>[weather {"city": "Ås"}][now {}]'),
    (NAMED, "weather<tool>wetnow<tool>noon"),
    (REPR, '[weather {"city": "Ås"}][now {}]<tool>wet'),
    (SINGLE, '<assistant>[weather {"city": "Ås"}]<tool>wet<assistant>[now {}]<tool>noon'),
])  # fmt: skip
def test_templates_get_calls_in_their_form(template: str, called: str) -> None:
    text = rendered(template)
    assert called in text
    assert '"name": "weather"' in text or template == REPR
    assert "wet" in text
    assert "noon" in text
    assert "'" not in text or template == REPR


def test_ids_have_the_length_of_the_template() -> None:
    first, second = (rendered(SHORT_IDS).split("[TOOL_CALLS]")[at][:9] for at in (1, 2))
    assert first.isalnum()
    assert f"{first}<tool>wet{second}<tool>noon" in rendered(SHORT_IDS)


def test_thinking_is_left_out_where_a_template_refuses_it() -> None:
    talk = tuple(replace(m, content=m.content or "Well.") for m in TALK)
    assert "Well." in rendered(HARMONY, talk)
    assert "Hm." not in rendered(HARMONY, talk)


def test_prompts_that_end_with_the_opener_continue_with_a_text() -> None:
    functionary = OBJECT + "{# >>>all #}>>>"
    assert text_header(Templated(functionary), rendered(functionary)) == "all\n"
    assert text_header(Templated(OBJECT + ">>>"), rendered(OBJECT + ">>>")) == ""


@pytest.mark.parametrize("template", [IGNORES, NO_SYSTEM])
def test_a_template_that_ignores_tools_gets_text(template: str) -> None:
    talk = TALK if template != NO_SYSTEM else TALK[1:]
    text = rendered(template, talk)
    assert "# Tools" in text
    assert text.count("<assistant>") == 1
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ås"}}\n</tool_call>' in text
    assert text.endswith(
        "<user><tool_response>\nwet\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    if template == NO_SYSTEM:
        assert text.startswith("<user># Tools")
        assert "\n\nRain?<assistant>" in text
    else:
        assert text.startswith("<system>Be brief.\n\n# Tools")


@pytest.mark.parametrize(("token", "calls"), [
    ("<|tool_call_start|>", "<|tool_call_start|>[weather(city='Ås'), now()]<|tool_call_end|>"),
    (
        "<|tool_call|>",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Ås"}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    (
        "",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ås"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
])  # fmt: skip
def test_calls_are_written_where_a_template_shows_all_but_these(token: str, calls: str) -> None:
    text = rendered(UNCALLED, token=token)
    assert f"<assistant>{calls}<tool>wet<tool>noon" in text
    assert "# Tools" not in text


def test_the_starter_takes_tools_as_text(starter_engine: Engine) -> None:
    prompt = starter_engine.tokens.encode_chat(TALK, TOOLS)
    text = starter_engine.tokens.tokenizer.decode(prompt)
    assert '{"name": "weather", "description": "Says it."' in text
    assert parser_for(starter_engine.tokens.tokenizer, TOOLS).markers == (
        "<tool_call>",
        "</tool_call>",
    )


LATE = (
    *TALK, Message("system", "Mind the time."), Message("assistant", "It is wet."),
    Message("system", "Two files changed."), Message("user", "And now?"),
)  # fmt: skip


@pytest.mark.parametrize("template", [FIRST_SYSTEM + OBJECT, ALTERNATING + IGNORES])
def test_late_system_messages_keep_every_earlier_prompt_a_prefix(template: str) -> None:
    prompts = [rendered(template, LATE[:end]) for end in (6, 7, 9)]
    assert all(later.startswith(first) for first, later in itertools.pairwise(prompts))
    assert "noon" in prompts[0]
    assert "Mind the time." in prompts[0]
    assert "Two files changed.\n\nAnd now?" in prompts[-1]
    plain = [message for message in LATE if not message.tool_calls and message.role != "tool"]
    assert "Rain?\n\nMind the time." in rendered(template, tuple(plain), ())


def test_late_system_message_between_a_call_and_its_result_follows_the_call() -> None:
    late = (*TALK[:3], Message("system", "Wait."), *TALK[3:])
    assert [each.role for each in fold_late_system(late)] == [each.role for each in TALK]
    assert fold_late_system(late)[3].content == "Wait.\n\nwet"
    assert fold_late_system(late)[3].tool_call_id == "call_1"
    end = fold_late_system((*REQUESTED, Message("assistant", "a"), Message("system", "b")))
    assert [(each.role, each.content) for each in end[2:]] == [("assistant", "a"), ("user", "b")]
