"""Program that renders chat templates, in a process with limits.

`chat_template` runs this file with the memory limit in bytes and the directories of Jinja. It
imports only Jinja and the standard library, to start within 0.1 s. Requests and replies are lines
of JSON; the first, empty reply means that it is ready. Templates see the same sandbox as in
transformers (utils/chat_template_utils.py).
"""

import contextlib
import json
import resource
import sys
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[2:]

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_EXTRA_CHARACTERS = 2_000_000  # of a text beyond twice the characters of its request
CPU_SECONDS = 11  # CPU time for a template if the parent process is gone


class _Generation(Extension):
    """Accepts the tag around the assistant's text and ignores it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` for templates, without its other attributes."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, restricted to names that templates may store."""

    def __init__(*args: Any, **items: Any) -> None:
        for name in (values := dict(*args[1:], **items)):
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be stored in a namespace")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    form = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    return json.dumps(value, **form, sort_keys=sort_keys)


@lru_cache(maxsize=4)
def compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def rendered_reply(line: bytes) -> dict[str, str]:
    """Return the rendered text of a request, or the reason why there is none."""
    request = json.loads(line)
    try:
        text = compiled(request["template"]).render(request["variables"])
    except MemoryError:
        return {"error": "it requests more memory than a template needs"}
    except Exception as error:  # noqa: BLE001 - a template can raise any exception
        return {"error": str(error)[:4000] or type(error).__name__}
    if len(text) > MAX_EXTRA_CHARACTERS + 2 * len(line):
        return {"error": f"it writes {len(text)} characters"}
    return {"text": text}


def main() -> None:
    """Limit this process, print the empty first reply, then reply to each line of stdin."""
    for kind, limit in ((resource.RLIMIT_AS, int(sys.argv[1])), (resource.RLIMIT_FSIZE, 0)):
        # macOS has no limit of memory; there `chat_template` watches it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        soft = int(time.process_time()) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        print(json.dumps(rendered_reply(line)), flush=True)


if __name__ == "__main__":
    main()
