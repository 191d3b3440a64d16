"""`akunu completions`: print a completion script for a shell."""

import argparse
from typing import Any

from akunu_py.errors import AkunuError
from akunu_py.models import catalog
from akunu_py.models.store import model_store
from akunu_py.text import for_output, say

SHELLS = ("bash", "zsh", "fish")
_MODELS = {"NAME_OR_PATH", "MODEL"}  # values of options and arguments that are models
_FILES = {"FILE", "PATH", "FILE|JSON", "FILE|N"}


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "Shell whose script to print; models: print the model names that scripts complete"
    parser.add_argument("shell", choices=(*SHELLS, "models"), help=text)


def run(args: argparse.Namespace) -> int:
    if args.shell == "models":
        for name in model_names():
            say(name)
        return 0
    import shtab

    parser = args.whole_parser()
    _mark(parser)
    print(for_output(shtab.complete(parser, args.shell)))
    return 0


def model_names() -> list[str]:
    """Return the names of the usable models on this machine."""
    try:
        models = model_store.all_models()
    except AkunuError:
        return []  # a script's errors would disturb the command line
    return [model.name for model in models if not model.damaged]


def _mark(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark(command)
            continue
        is_model = action.metavar in _MODELS
        of_models = parser.prog.startswith("akunu models ") and not action.option_strings
        if parser.prog == "akunu models pull" and is_model:
            action.choices = list(catalog.load_catalog())
        elif is_model or (of_models and action.metavar == "NAME"):
            action.complete = _complete_models()  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _complete_models() -> Any:
    import shtab

    command = "akunu completions models"
    found: Any = shtab.cmd(command)
    # zsh would run shtab's own form once for each option, when the script is loaded.
    preamble = found["preamble"] | {"zsh": f"_akunu_models() {{ compadd -- $({command}) }}"}
    return found | {"zsh": "_akunu_models", "preamble": preamble}
