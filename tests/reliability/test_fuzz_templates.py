"""Chat templates with bad intentions: they stay in the sandbox, and end in one clear line."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from akunu_py.decoding.chat_format import chat_template
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, UnsupportedModel
from akunu_py.types import Message
from tests.reliability.fuzz import damaged, explore, lengths
from tests.support.slow import cover
from tests.support.tiny_fim import byte_level, write_model

GOOD = (
    "{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>' ~ message.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK = [Message("system", "Be brief."), Message("user", "Hello")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = write_model(tmp_path_factory.mktemp("tiny"), byte_level(["<|end|>"]), end="<|end|>")
    (directory / "chat_template.jinja").write_text(GOOD)
    return Engine.load(directory, name="tiny")


@pytest.fixture(autouse=True)
def same_template_afterwards(tiny: Engine) -> Iterator[None]:
    before = tiny.tokens.tokenizer.chat_template
    yield
    tiny.tokens.tokenizer.chat_template = before


def says(engine: Engine, template: str) -> str:
    """What the model would read of ASK."""
    engine.tokens.tokenizer.chat_template = template
    return str(engine.tokens.tokenizer.decode(engine.tokens.encode_chat(ASK)))


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
    with pytest.raises(UnsupportedModel, match=r"did not finish within 0\.2 seconds"):
        says(tiny, template)
    monkeypatch.undo()
    assert "Hello" in says(tiny, GOOD)  # and the next one is not


def test_a_template_that_writes_a_library(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_EXTRA_CHARACTERS", 1 << 16)
    with pytest.raises(UnsupportedModel, match="writes 99999 characters"):
        says(tiny, LOOP + "x{% endfor %}")


@pytest.mark.parametrize(
    "expression",
    [
        "7**(10**9) % 10",
        "'x' * 10**10",
        "('a ' * 10**6) | wordwrap(1) | length",
        "'a' | wordwrap(10**8) | center(10**10)",
        "'a' | slice(10**9) | list | length",
        "'%*d' | format(10**10, 1)",
        "'{:10000000000}'.format(1)",
        "(2.5) | round(10**9, 'ceil')",
        "(5).to_bytes(10**10, 'big')",
        "[1] | tojson(indent=10**10)",
        "'a' | indent(10**10, true)",
        "('a' * 10**5).replace('', 'a' * 10**6)",
        "range(99999) | map('string') | join('x' * 10**6)",
    ],
)
def test_one_expression_that_asks_for_too_much(
    tiny: Engine, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.5)
    with contextlib.suppress(UnsupportedModel):
        says(tiny, "{{ " + expression + " }}")
    monkeypatch.undo()
    assert "Hello" in says(tiny, GOOD)


DOUBLE = (
    "{% set ns = namespace(x=SEED) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
    "{{ USE }}"
)


@pytest.mark.parametrize(
    ("doubled", "use"),
    cover(
        [("'a'", "ns.x ~ ns.x"), ("[1]", "[ns.x, ns.x]")],
        ["ns.x", "ns.x | tojson", "ns.x == [1]", "ns.x | string | length"],
    ),
)
def test_what_doubles(tiny: Engine, doubled: tuple[str, str], use: str) -> None:
    seed, step = doubled
    before = chat_template.TIME_LIMIT_S
    chat_template.TIME_LIMIT_S = 0.5
    try:
        with contextlib.suppress(UnsupportedModel):
            says(tiny, DOUBLE.replace("SEED", seed).replace("STEP", step).replace("USE", use))
    finally:
        chat_template.TIME_LIMIT_S = before
    assert "Hello" in says(tiny, GOOD)


def numbers() -> st.SearchStrategy[str]:
    return st.sampled_from(["2", "10**9", "10**10", "99999", "7**8", "(3 - 1)", "0", "-1"])


def texts() -> st.SearchStrategy[str]:
    return st.sampled_from(["'a'", "'a b' * 99999", "'%9999999999d'", "messages[0].content", "''"])


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Operators, filters and methods on numbers and texts that are too large for each of them."""
    number, other, text, more = (draw(made) for made in (numbers(), numbers(), texts(), texts()))
    return draw(
        st.sampled_from(
            [
                *(f"({number}) {operator} ({other})" for operator in ("**", "*", "//", "%", "-")),
                f"({text}) * ({number})",
                f"[{text}] * ({number}) | length",
                f"({text}) % ({number})",
                *(
                    f"({text}) | {name}({number})"
                    for name in ("center", "wordwrap", "indent", "truncate", "batch", "slice")
                ),
                *(f"(({text}).{name}({number}))" for name in ("ljust", "zfill", "expandtabs")),
                f"({text}).replace('', {more})",
                f"({text}) | list | join({more})",
                f"({number}) | round({other}, 'floor')",
                f"range({number}) | list | sort | unique | list | tojson({other})",
                f"dict(a=range({number}) | list) | pprint",
                f"({text}) | urlize | {draw(st.sampled_from(['upper', 'title', 'forceescape']))}",
            ]
        )
    )


@lengths(15)
def test_expressions_of_any_size(
    examples: int, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None takes longer than the limit, or more memory than the process is given."""
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.5)
    most = 0

    def check(expression: str) -> None:
        nonlocal most
        started = time.monotonic()
        with contextlib.suppress(UnsupportedModel):
            says(tiny, "{{ " + expression + " }}")
        assert time.monotonic() - started < 10
        most = max(most, resident())

    explore(check, examples, expressions())
    assert 0 < most < chat_template.MEMORY_LIMIT


def resident() -> int:
    """Bytes that the process of templates has had at most; 0 where it was just ended."""
    running = chat_template._process._running
    if running is None or not Path("/proc").is_dir():
        return 1
    status = Path(f"/proc/{running.pid}/status").read_text()
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line), 1)


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


@lengths(20)
def test_the_text_is_that_of_transformers(examples: int, tiny: Engine) -> None:
    turns = [{"role": message.role, "content": message.content} for message in ASK]

    def check(template: str) -> None:
        tiny.tokens.tokenizer.chat_template = template
        try:
            expected = tiny.tokens.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
            expected.encode()
        except Exception:  # noqa: BLE001
            expected = None
        try:
            rendered = chat_template.render(tiny.tokens.tokenizer, turns, "tiny")
        except UnsupportedModel:
            rendered = None
        assert rendered == expected

    for template in TEMPLATES:
        check(template)
    pieces = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
    explore(check, examples, pieces | st.sampled_from(TEMPLATES).flatmap(_shuffled))


def _shuffled(template: str) -> st.SearchStrategy[str]:
    return damaged(template.encode()).map(lambda data: data.decode("utf-8", "replace"))


def test_memory_is_watched_where_the_system_sets_no_limit(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: the process starts without a limit, and what it holds is seen from outside."""
    chat_template._process.end()
    monkeypatch.setattr(chat_template, "MEMORY_LIMIT", 1 << 40)
    assert "Hello" in says(tiny, GOOD)
    monkeypatch.setattr(chat_template, "MEMORY_LIMIT", 200 << 20)
    held = "{% set x = 'a' * (300 * 2**20) %}"
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{{ x | length }}"
    with pytest.raises(UnsupportedModel, match="more memory than a template needs"):
        says(tiny, held + loop + "{% endfor %}" * 2)
    monkeypatch.undo()
    chat_template._process.end()
    assert "Hello" in says(tiny, GOOD)


def test_an_interrupt_ends_the_process(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> bytes:
        raise KeyboardInterrupt

    assert "Hello" in says(tiny, GOOD)
    running = chat_template._process._running
    monkeypatch.setattr(chat_template._process, "_read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        says(tiny, GOOD)
    assert running is not None
    assert running.returncode is not None
    monkeypatch.undo()
    assert "Hello" in says(tiny, GOOD)


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
    assert asked == []
    assert not ran.exists()
