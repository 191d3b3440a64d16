"""Completion scripts: in real shells, for every command and option."""

import argparse
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from akunu_py import cli
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from tests.support.command import printed

_BASH = """
source "$1"
while IFS= read -r line; do
  read -ra COMP_WORDS <<<"$line"
  [[ $line == *' ' ]] && COMP_WORDS+=('')
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _shtab_akunu
  echo "${COMPREPLY[@]}"
done
"""
_ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath=(${0:h} \\$fpath); autoload -U compinit; compinit -D -u; echo LOA''DED"
zpty -r shell out '*LOADED*'
zpty -w -n shell $'akunu models rm my\\t'
zpty -r shell out '*rm my-model*'
zpty -d shell
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of each shell's script."""
    directory = tmp_path_factory.mktemp("scripts")
    files = {"bash": directory / "bash", "fish": directory / "fish", "zsh": directory / "_akunu"}
    for shell, path in files.items():
        path.write_text(printed("completions", shell))
    return files


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A PATH where `akunu` names two models."""
    command = tmp_path / "akunu"
    command.write_text('#!/bin/sh\n[ "$*" = "completions models" ] && echo my-model them/tiny\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, set[str]]]:
    """Yields each command line, with what may follow: the commands, or the options."""
    options: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield f"{parser.prog} ", set(action.choices)
            for command in dict.fromkeys(action.choices.values()):
                yield from commands(command)
        elif action.help != argparse.SUPPRESS:
            options.update(option for option in action.option_strings if option[:2] == "--")
    yield f"{parser.prog} --", options


def test_bash_completes_every_command_and_option(
    scripts: dict[str, Path], environment: dict[str, str]
) -> None:
    expected = dict(commands(cli._parser(*cli._COMMANDS)))
    assert len(expected) > 30
    done = subprocess.run(
        ["bash", "-c", _BASH, "bash", str(scripts["bash"])],
        input="\n".join([*expected, "akunu models rm ", "akunu run --model them/", ""]),
        capture_output=True,
        text=True,
        env=environment,
    )
    *found, removable, runnable = done.stdout.splitlines()
    for line, words, offered in zip(expected, expected.values(), found, strict=True):
        assert words <= set(offered.split()), line
    assert removable.split() == ["my-model", "them/tiny"], done.stderr
    assert runnable.split() == ["them/tiny"]


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes_models(scripts: dict[str, Path], environment: dict[str, str]) -> None:
    def offered(line: str) -> list[str]:
        script = f"source {scripts['fish']}; complete -C '{line}'"
        command = ["fish", "--no-config", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return [each.split("\t")[0] for each in done.stdout.splitlines()]

    assert set(offered("akunu ")) == set(cli._COMMANDS)
    assert " ".join(offered("akunu models rm ")) == "my-model them/tiny"


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_completes_models(scripts: dict[str, Path], environment: dict[str, str]) -> None:
    driver = scripts["zsh"].with_name("driver")
    driver.write_text(_ZSH)
    subprocess.run(["zsh", driver], env=environment, timeout=60, check=True)
    # Evaluated while the script is loaded, this would run once for each option.
    assert "($(" not in scripts["zsh"].read_text()


def test_models_prints_the_usable_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine, bad = StoredModel("mine", tmp_path), StoredModel("bad", tmp_path, damaged="empty")
    theirs = StoredModel("them/tiny", tmp_path, program="LM Studio")
    monkeypatch.setattr(model_store, "list_models", lambda: [mine, bad])
    monkeypatch.setattr(model_store, "external_models", lambda stored: [theirs])
    assert printed("completions", "models") == "mine\nthem/tiny\n"
