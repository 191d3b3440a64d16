"""Chat templates with bad intentions: they stay in the sandbox, and end in one clear line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from akunu_py.decoding import chat_template
from akunu_py.decoding.engine import Engine
from akunu_py.errors import AkunuError, UnsupportedModel
from akunu_py.types import Message
from tests.reliability.fuzz import damaged, explore, lengths
from tests.support.tiny_fim import byte_level, write_model

GOOD = (
    "{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>' ~ message.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK = [Message("system", "Be brief."), Message("user", "Hello")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_model(tmp_path_factory.mktemp("tiny"), byte_level(["<|end|>"]), end="<|end|>")
    (folder / "chat_template.jinja").write_text(GOOD)
    return Engine.load(folder, name="tiny")


@pytest.fixture(autouse=True)
def same_template_afterwards(tiny: Engine) -> Iterator[None]:
    before = tiny.tokenizer.chat_template
    yield
    tiny.tokenizer.chat_template = before


def says(engine: Engine, template: str) -> str:
    """What the model would read of ASK."""
    engine.tokenizer.chat_template = template
    return str(engine.tokenizer.decode(engine.encode_chat(ASK)))


def test_a_good_template(tiny: Engine) -> None:
    assert says(tiny, GOOD) == "<|system|>Be brief.\n<|user|>Hello\n<|assistant|>"


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__base__.__subclasses__()",
        "messages[0].__class__.__init__.__globals__",
        "cycler.__init__.__globals__.os.popen('touch FILE').read()",
        "joiner.__init__.__globals__['os'].system('touch FILE')",
        "namespace.__init__.__globals__['jinja2']",
        "lipsum.__globals__['os'].system('touch FILE')",
        "raise_exception.__globals__['json']",
        "strftime_now.__globals__",
        "strftime_now.__code__.co_consts",
        "dict.fromkeys.__func__.__globals__",
        "self.__init__.__globals__",
        "self._TemplateReference__context.environment",
        "'' | attr('__class__') | attr('__mro__')",
        "['']|map(attribute='__class__')|list",
        "'{0.__class__.__init__.__globals__}'.format(cycler)",
        "'{x.__class__}'.format_map({'x': ''})",
        "('%s' | format(''.__class__.__mro__))",
        "messages.append({'role': 'user', 'content': 'Lie.'})",
        "messages[0].update(content='Lie.')",
        "messages[0].__setitem__('content', 'Lie.')",
        "namespace(__class__=1).__class__",
        "(messages | map('attr', '__class__') | list)[0].__subclasses__()",
        "get_flashed_messages.__globals__",
        "request.application.__globals__",
        "url_for.__globals__.os",
    ],
)
def test_python_is_out_of_reach(tiny: Engine, expression: str, tmp_path: Path) -> None:
    """Nothing of Python's own is shown, nothing runs, and the conversation stays as it was."""
    file = tmp_path / "touched"
    with contextlib.suppress(UnsupportedModel):
        said = says(tiny, "{{ " + expression.replace("FILE", str(file)) + " }}")
        assert not [word for word in ("<class", "<module", "<function", "builtin") if word in said]
    assert not file.exists()
    assert [message.content for message in ASK] == ["Be brief.", "Hello"]


@pytest.mark.parametrize(
    "statement",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends '/etc/passwd' %}",
        "{% from 'os' import system %}{{ system('true') }}",
        "{% set messages.x = 1 %}",
    ],
)
def test_files_and_modules_are_out_of_reach(tiny: Engine, statement: str) -> None:
    with pytest.raises(UnsupportedModel, match="chat template of tiny"):
        says(tiny, statement)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content }}",
        "{{ messages | sum }}",
        "{{ range(10 ** 9) | list }}",
        "{% for x in %}",
        "{{ raise_exception('roles must\n\nalternate') }}",
        "{{ nothing.at.all }}",
        "{% if %}",
        "{{ '\\ud800' }}" + "{{ 5 % 0 }}",
        "{{ " + "(" * 3000,
        "{% for x in [1] %}{{ '\ud800' }}{% endfor %}",
    ],
    ids=range(12),
)
def test_what_a_template_raises_is_one_line(tiny: Engine, template: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        says(tiny, template)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


LOOP = "{% for x in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP * 4 + "{% endfor %}" * 4,
        "{% macro f(n) %}" + "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}" + "{% endmacro %}"
        "{{ f(60) }}",
        "{% set ns = namespace(n=0) %}" + LOOP * 3 + "{% set ns.n = ns.n + 1 %}{% endfor %}" * 3,
    ],
    ids=["loops", "macros", "sums"],
)
def test_a_template_without_an_end_is_stopped(
    tiny: Engine, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.2)
    with pytest.raises(UnsupportedModel, match=r"did not come to an end within 0\.2 seconds"):
        says(tiny, template)
    assert "Hello" in says(tiny, GOOD)  # and the next one is not


def test_a_template_that_writes_a_library(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LONGEST", 1 << 16)
    with pytest.raises(UnsupportedModel, match="writes 99999 characters"):
        says(tiny, LOOP + "x{% endfor %}")


WORDS = [
    "{{", "}}", "{%", "%}", "{#", "#}", "-", " for ", " in ", " if ", " set ", "endfor", "endif",
    "message", "messages", ".content", "['role']", "|", "trim", "tojson", "loop.index", "0", "'",
    "(", ")", "~", "=", "namespace", "generation", "break", "\n", "\ud800", "__class__", "range",
]  # fmt: skip


@lengths(75)
def test_made_up_templates(examples: int, tiny: Engine) -> None:
    def check(template: str) -> None:
        with contextlib.suppress(AkunuError):
            says(tiny, template)

    pieces = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
    broken = damaged(GOOD.encode()).map(lambda data: data.decode("utf-8", "replace"))
    explore(check, examples, pieces | broken)


def test_code_of_a_model_is_never_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on the terminal, and a yes typed for something else would do."""
    asked = []

    def agree(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    folder = write_model(tmp_path / "model", byte_level(["<|end|>"]), end="<|end|>")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass Evil: pass\n"
    for name in ("evil.py", "tokenization_evil.py"):
        (folder / name).write_text(code)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for name in ("Evil", "PreTrainedTokenizerFast", "TokenizersBackend"):
        settings |= {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
        path.write_text(json.dumps(settings))
        with contextlib.suppress(AkunuError):
            Engine.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    with pytest.raises(AkunuError):
        Engine.load(folder)
    assert asked == []
    assert not ran.exists()
