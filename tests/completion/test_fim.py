"""Fill-in-the-middle prompts are, token for token, what each family's maker published."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompleteOptions, CompletionRequest, SourceFile
from akunu_py.completion.prompt.layout import CodeTokens, FimFamily, find_family, load_families
from akunu_py.engine.engine import Engine
from akunu_py.errors import UsageError
from tests.support.complete import complete
from tests.support.paths import GOLDEN
from tests.support.tiny_fim import byte_level, load_tiny, sentence_piece, write_model

EXPECTED = json.loads((GOLDEN / "fim_prompts.json").read_text("utf-8"))
BUFFER = EXPECTED["buffer"]
NAMES = list(EXPECTED["families"])
PLAIN = "<|endoftext|>"


def markers_of(name: str) -> list[str]:
    family = load_families()[name]
    return sorted({*family.tokens, *family.stop} - {"</s>", "<eos>"})


def completer_for(name: str, directory: Path, model: str = "tiny", fim: str = "auto") -> Completer:
    """A tiny model whose vocabulary has all that the golden file's prompt has."""
    golden = EXPECTED["families"][name]
    stop = golden["stop"][0]
    markers = [*markers_of(name), *({stop} - set(markers_of(name)))]
    first = golden["alone"][0]
    bos = first if first not in load_families()[name].markers and first.startswith("<") else None
    make = sentence_piece if golden.get("spm") else byte_level
    write_model(directory, make(markers, bos), end=stop)
    return Completer(Engine.load(directory, name=model), CompleteOptions(fim=fim))


def expected(completer: Completer, pieces: list[str], *, spm: bool) -> list[int]:
    """The golden tokens: a marker is one, and in these vocabularies every other letter is one."""
    vocabulary = completer.engine.tokens.tokenizer.get_vocab()
    tokens: list[int] = []
    for piece in pieces:
        if piece in vocabulary and len(piece) > 1:
            tokens.append(vocabulary[piece])
        elif spm:
            tokens += [vocabulary[letter] for letter in piece]
        else:
            letters = byte_level([]).encode(piece).tokens
            tokens += [vocabulary[letter] for letter in letters]
    return tokens


def request(family: FimFamily, *, files: bool) -> CompletionRequest:
    """Return a request without a path if the path would be in a comment, which no maker has."""
    other = BUFFER["other"]
    named = family.file if files else "{path}" in family.prompt
    return CompletionRequest(
        BUFFER["prefix"],
        BUFFER["suffix"],
        BUFFER["path"] if named else "",
        files=(SourceFile(other["path"], other["text"]),) if files else (),
        recent=("NAME",),
    )


@pytest.mark.parametrize("name", NAMES)
def test_prompt_is_the_published_one(name: str, tmp_path: Path) -> None:
    golden = EXPECTED["families"][name]
    named = load_families()[name].named
    how = (named[0], "auto") if named else ("tiny", name)
    completer = completer_for(name, tmp_path, *how)
    assert completer.family is load_families()[name]
    spm = bool(golden.get("spm"))
    made = completer.prompt(request(completer.family, files=False))
    assert made.tokens == expected(completer, golden["alone"], spm=spm)
    with_files = completer.prompt(request(completer.family, files=True))
    published = golden.get("with_files", golden["alone"])
    assert with_files.tokens == expected(completer, published, spm=spm)
    assert list(load_families()[name].stop) == golden["stop"]
    stops = {completer.code.token(text) for text in golden["stop"] if text in completer.code}
    assert stops <= completer.engine.tokens.stop_tokens
    # Where it works at all, the model runs, and its output has no marker.
    done = complete(completer, request(completer.family, files=True))
    assert done.stats.prompt_tokens == len(with_files.tokens)
    assert not any(marker in done.text for marker in load_families()[name].markers)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_alone_has_its_path_and_its_markers_are_text(name: str, tmp_path: Path) -> None:
    """The path is in the format's place for it, otherwise in a comment."""
    completer = completer_for(name, tmp_path, fim=name)
    family = load_families()[name]
    made = completer.prompt(CompletionRequest("x = ", "\n", "/nowhere/lib/a.py", root="/nowhere"))
    text = completer.engine.tokens.tokenizer.decode(made.tokens)
    assert "nowhere/" not in text
    if family.path_alone or "{path}" in family.prompt:
        assert "lib/a.py" in text
        assert "# lib/a.py" not in text
        assert ("nowhere" in text) == ("{repository}" in family.repository)
    else:
        assert "# lib/a.py\nx = " in text
    honest = completer.prompt(CompletionRequest("x = ", "\n"))
    assert made.tokens != honest.tokens
    markers = [marker for marker in family.markers if marker in completer.code]
    generated = "".join(markers)
    hostile = completer.prompt(CompletionRequest("x = " + generated, "\n" + generated))
    ids = {completer.code.token(marker) for marker in markers}
    assert [t for t in hostile.tokens if t in ids] == [t for t in honest.tokens if t in ids]


def test_a_model_without_markers_continues_the_prefix(tmp_path: Path) -> None:
    completer = Completer(load_tiny(tmp_path, [PLAIN]))
    assert completer.family is None
    made = completer.prompt(CompletionRequest("a = (", ")"))
    assert completer.engine.tokens.tokenizer.decode(made.tokens) == "a = ("


@pytest.mark.parametrize(("model", "family"), [
    ("Qwen2.5-Coder-7B-Instruct-4bit", "qwen2.5-coder"), ("coder-1.5b", "qwen2.5-coder"),
    ("Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder"), ("qwen3-coder-30b", "qwen3-coder"),
    ("Qwen3-8B", None), ("Qwen2.5-7B-Instruct", None), ("DeepSeek-R1-Distill-Qwen-7B", None),
    ("Qwen2.5-Coder-7B-zeta", None), ("sweep-next-edit-1.5b", None),
    ("starcoder2-3b", "starcoder2"), ("Mellum-4b-base-4bit", "mellum"),
    ("granite-3b-code", "granite-code"), ("granite-4.0-h-tiny", "granite"),
    ("CodeGeeX4-ALL-9B", "codegeex4"), ("glm-4-9b-chat", None), ("some model", None),
])  # fmt: skip
def test_families_are_detected_by_model_name_and_vocabulary(model: str, family: str | None) -> None:
    """Also if a vocabulary has the tokens of all compatible families."""
    tokens = {token for each in load_families().values() for token in each.tokens}
    tokens -= {"<fim_prefix>"} if model.startswith("granite-4") else set()
    found = find_family("auto", tokens, model)
    assert (found.name if found else None) == family
    assert find_family("none", tokens, model) is None
    assert find_family("auto", set(), model) is None


def test_unknown_and_unsupported_formats_are_refused(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path, [PLAIN])
    for fim, words in (
        ("qwen", "unknown fill-in-the-middle format 'qwen'; formats: auto"),
        ("starcoder2", r"tiny has no token <fim_prefix>.*starcoder2"),
    ):
        with pytest.raises(UsageError, match=words):
            Completer(engine, CompleteOptions(fim=fim))


def test_runs_of_spaces_among_the_added_tokens_stay_tokens() -> None:
    tokenizer = byte_level(["<mark>", "    "])
    code = CodeTokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 2**31)
    spaces, mark = tokenizer.token_to_id("    "), tokenizer.token_to_id("<mark>")
    assert spaces in code.encode("x\n    y")
    assert mark not in code.encode("x<mark>y")
