"""Hostile chat templates stay in the sandbox, and end with one clear line."""

import _thread
import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st

from akunu_py.engine.engine import Engine
from akunu_py.engine.template import chat_template
from akunu_py.engine.template.chat_template import TemplateProcess
from akunu_py.errors import AkunuError, UnsupportedModel
from akunu_py.types import Message
from tests.reliability.fuzz import damaged, explore, lengths
from tests.support.tiny_fim import byte_level, load_tiny, write_model

GOOD = (
    "{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>' ~ message.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [Message("system", "Be brief."), Message("user", "Hello")]
TURNS = [{"role": message.role, "content": message.content} for message in MESSAGES]
Rendering = Callable[..., str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("tiny"), ["<|end|>"], template=GOOD)


@pytest.fixture(scope="module")
def shared() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.end()


@pytest.fixture
def render(tiny: Engine, shared: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> Rendering:
    def render(template: str, process: TemplateProcess = shared) -> str:
        # Short for templates without an end, long for the others on a busy machine.
        shared.time_limit_s = 0.4 if template in (ENDLESS, *EXPENSIVE) else 60.0
        monkeypatch.setattr(chat_template, "_process", process)
        tiny.tokens.tokenizer.chat_template = template
        return chat_template.render(tiny.tokens.tokenizer, TURNS, "tiny")

    return render


@pytest.mark.parametrize("expression", [
    "''.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__.os.popen('touch FILE').read()",
    "lipsum.__globals__['os'].system('touch FILE')", "raise_exception.__globals__['json']",
    "strftime_now.__code__.co_consts", "self._TemplateReference__context.environment",
    "'' | attr('__class__') | attr('__mro__')",
    "'{0.__class__.__init__.__globals__}'.format(cycler)",
    "('%s' | format(''.__class__.__mro__))", "messages[0].update(content='Lie.')",
    "(messages | map('attr', '__class__') | list)[0].__subclasses__()",
])  # fmt: skip
def test_python_is_out_of_reach(render: Rendering, expression: str, tmp_path: Path) -> None:
    file = tmp_path / "touched"
    before = json.dumps(TURNS)
    with contextlib.suppress(UnsupportedModel):
        text = render("{{ " + expression.replace("FILE", str(file)) + " }}")
        assert not [word for word in ("<class", "<module", "<function", "builtin") if word in text]
    assert not file.exists()
    assert json.dumps(TURNS) == before


LOOP = "{% for x in range(99999) %}"
ENDLESS = LOOP * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% include '/etc/passwd' %}", "chat template of tiny"),
        ("{% from 'os' import system %}{{ system('true') }}", "chat template of tiny"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template of tiny"),
        ("{% for x in %}", "chat template of tiny"),
        ("{{ " + "(" * 3000, "chat template of tiny"),
        ("{% for x in [1] %}{{ '\ud800' }}{% endfor %}", "chat template of tiny"),
        ("{{ raise_exception('roles must\n\nalternate') }}", "roles must alternate"),
        (ENDLESS, r"did not finish within 0\.4 seconds"),
        (LOOP + "x" * 30 + "{% endfor %}", "writes 2999970 characters"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ 'x' * 10**10 }}", "more memory than a template needs"),
    ],
    ids=range(11),
)
def test_failed_templates_are_one_line_and_leave_the_next_one_alone(
    render: Rendering, template: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        render(template)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "Hello" in render(GOOD)


DOUBLE = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
EXPENSIVE = [
    DOUBLE + "{% endfor %}{{ ns.x }}", "{{ 'a' | slice(10**9) | list | length }}",
    "{{ '%*d' | format(10**10, 1) }}", "{{ ('a' * 10**5).replace('', 'a' * 10**6) }}",
    "{{ 7**(10**9) % 10 }}",
]  # fmt: skip


@pytest.mark.parametrize("template", EXPENSIVE, ids=range(len(EXPENSIVE)))
def test_expensive_operations_end_within_the_limits(render: Rendering, template: str) -> None:
    with contextlib.suppress(UnsupportedModel):
        render(template)
    assert "Hello" in render(GOOD)


TEMPLATES = [
    GOOD,
    "{%- generation %}{{ messages[0].content | tojson }}{% endgeneration -%}\n x",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.a }}{{ dict(b=2) }}",
    "{{ bos_token }}|{{ eos_token }}|{{ enable_thinking }}|{{ tools is none }}|{{ nothing }}",
    "{{ {'z': 'ü<', 'a': [1, none, 1.5]} | tojson(indent=2) }}  \n  {% if true %}\n a\n{% endif %}",
    "{{ dict.fromkeys('ab', 1) | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{{ raise_exception('no\n  way') }}",
    "{{ strftime_now('%Y') }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages | length) }}",
    "{{ messages[1]['content'].split('l')[-1] | trim }}{{ ns.__class__ }}{{ namespace(_a=1) }}",
]


@lengths(25)
def test_the_text_is_that_of_transformers(examples: int, render: Rendering, tiny: Engine) -> None:
    def check(template: str) -> None:
        try:
            rendered = render(template)
        except UnsupportedModel:
            rendered = None
        try:
            expected = tiny.tokens.tokenizer.apply_chat_template(
                TURNS, add_generation_prompt=True, tokenize=False
            )
            expected.encode()
        except Exception:  # noqa: BLE001 - anything that a template raises
            expected = None
        assert rendered == expected

    for template in TEMPLATES:
        check(template)
    altered = st.sampled_from([template.encode() for template in TEMPLATES]).flatmap(damaged)
    explore(lambda data: check(data.decode("utf-8", "replace")), examples, altered)


def test_memory_is_watched_where_the_system_sets_no_limit(render: Rendering) -> None:
    process = TemplateProcess()
    process.memory_limit, process.limits_itself = 200 << 20, False
    assert "Hello" in render(GOOD, process)
    with pytest.raises(UnsupportedModel, match="more memory than a template needs"):
        render("{% set x = 'a' * (300 * 2**20) %}" + ENDLESS, process)
    assert "Hello" in render(GOOD, process)
    process.end()


def test_reply_after_an_interrupt_is_the_next_templates_own(render: Rendering) -> None:
    process, before = TemplateProcess(), signal.signal(signal.SIGINT, signal.default_int_handler)
    assert "Hello" in render(GOOD, process)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            threading.Thread(target=_thread.interrupt_main).start()
            render(ENDLESS, process)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Hello" in render(GOOD, process)
    process.end()


def test_code_of_a_model_never_runs_and_nothing_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would prompt on the terminal."""
    prompt = Mock(return_value="y")
    monkeypatch.setattr("builtins.input", prompt)
    directory = write_model(tmp_path / "model", byte_level(["<|end|>"]), end="<|end|>")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass Evil: pass\n"
    for name in ("evil.py", "tokenization_evil.py"):
        (directory / name).write_text(code)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for name in ("Evil", "PreTrainedTokenizerFast", "TokenizersBackend"):
        settings |= {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
        path.write_text(json.dumps(settings))
        with contextlib.suppress(AkunuError):
            Engine.load(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    with pytest.raises(AkunuError):
        Engine.load(directory)
    prompt.assert_not_called()
    assert not ran.exists()
