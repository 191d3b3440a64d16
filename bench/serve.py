"""`akunu bench serve`: what clients of a server wait for, akunu's beside mlx-lm's own.

Both get the same requests: of clients that go back to a conversation, also after a restart and
after they hung up; of one that is answered while another's prompt is read; of several at once.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from akunu_py.bench.servers import Reply, Server, Talk, prepare

SERVERS = ("akunu", "mlx-lm")
_TURN_WORDS, _TURNS = 1900, 10  # of the agent: twenty thousand tokens in all
_SAY_WORDS = 30
_IDLE_S = 6.0  # between two answers and a restart: a user who reads
_HEALTH = 200


@dataclass(slots=True)
class ServerTimes:
    """Of one server. requests: to whose first token one waits, by what was done before. alone,
    beside: an answer while nobody else asks, and while a long prompt is read. tokens_per_s: of all
    clients together, by how many there are. health_per_s: requests that need no model."""

    requests: dict[str, Reply] = field(default_factory=dict)
    alone: Reply = field(default_factory=Reply)
    beside: Reply = field(default_factory=Reply)
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    health_per_s: float = 0.0


def compare_servers(
    source: Path,
    layers: int,
    words: int,
    tokens: int,
    clients: Sequence[int],
    progress: Callable[[str], None],
) -> dict[str, ServerTimes]:
    """What was measured, by server; each starts with empty caches.

    layers: of the model that is kept. words: of a conversation that is gone back to. tokens: of an
    answer that is written while others ask. clients: how many ask at once.
    """
    with tempfile.TemporaryDirectory() as work:
        model = Path(work, "model")
        model.mkdir()
        prepare(source, model, layers)
        found = {}
        for name in SERVERS:
            server, times = Server(name, model), ServerTimes()
            server.start()
            try:
                _go_back(server, words, times, progress)
                _interrupt(server, words, times, progress)
                _write_beside(server, words, tokens, times, progress)
                for count in clients:
                    progress(f"{name}: {count} at once")
                    times.tokens_per_s[count] = _at_once(server, count, tokens)
                times.health_per_s = _HEALTH / server.is_well(_HEALTH)
            finally:
                server.stop()
            found[name] = times
        return found


def _go_back(
    server: Server, words: int, times: ServerTimes, progress: Callable[[str], None]
) -> None:
    def ask(name: str, talk: Talk) -> None:
        progress(f"{server.name}: {name}")
        times.requests[name] = server.ask(talk)

    first, second = Talk(1), Talk(2)
    for talk, name in ((first, "a long prompt"), (second, "another one")):
        talk.say(words)
        ask(name, talk)
    for talk, name in ((first, "back to the first"), (second, "back to the second")):
        talk.say(_SAY_WORDS)
        ask(name, talk)
    agent = Talk(3)
    for turn in range(_TURNS):
        agent.say(_TURN_WORDS)
        ask(f"agent, turn {turn + 1}", agent)
    time.sleep(_IDLE_S)
    server.stop()
    server.start()
    for talk, name in ((first, "first after a restart"), (agent, "agent after a restart")):
        talk.say(_SAY_WORDS)
        ask(name, talk)


def _interrupt(
    server: Server, words: int, times: ServerTimes, progress: Callable[[str], None]
) -> None:
    """A client hangs up when about half of its prompt is read, and asks again."""
    progress(f"{server.name}: hung up and asked again")
    talk = Talk(4)
    talk.say(words)
    server.ask(talk, hang_up_s=times.requests["a long prompt"].ttft / 2)
    times.requests["asked again"] = server.ask(talk)


def _write_beside(
    server: Server, words: int, tokens: int, times: ServerTimes, progress: Callable[[str], None]
) -> None:
    """An answer alone, and one that is written while another client's prompt is read."""
    progress(f"{server.name}: an answer beside a prompt")
    writer = Talk(5)
    writer.say(_SAY_WORDS)
    server.ask(writer, tokens)  # reads the prompt
    writer.messages.pop()
    times.alone = server.ask(writer, tokens)
    writer.messages.pop()
    reader = Talk(6)
    reader.say(words)
    other = threading.Thread(target=server.ask, args=(reader,))
    other.start()
    times.beside = server.ask(writer, tokens)
    other.join()


def _at_once(server: Server, count: int, tokens: int) -> float:
    """Tokens a second of so many clients together."""
    talks = [Talk(100 * count + number) for number in range(count)]
    for talk in talks:
        talk.say(_SAY_WORDS)
    started = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(lambda talk: server.ask(talk, tokens), talks))
    return sum(max(0, reply.tokens) for reply in replies) / (time.perf_counter() - started)


def print_servers(found: dict[str, ServerTimes]) -> None:
    """Tables for a terminal."""
    names = list(found)
    print("seconds to the first token, and tokens of the prompt that were cached\n")
    print(f"{'':<24}{'prompt':>8}", *(f"{name:>20}" for name in names))
    for scenario, ours in found[names[0]].requests.items():
        if scenario.startswith("agent, turn") and not scenario.endswith(f" {_TURNS}"):
            continue
        cells = []
        for name in names:
            each = found[name].requests[scenario]
            cached = f"{each.cached:,}" if each.cached >= 0 else "?"
            cells.append(f"{each.ttft:>10.2f} s {cached:>8}")
        print(f"{scenario:<24}{ours.prompt:>8,}", *cells)
    rows: list[tuple[str, Callable[[ServerTimes], str]]] = [
        ("ms a token, alone", lambda each: f"{1000 * each.alone.token_s:.1f}"),
        ("  beside a prompt", lambda each: f"{1000 * each.beside.token_s:.1f}"),
        ("  longest wait, ms", lambda each: f"{1000 * each.beside.worst_gap:.0f}"),
    ]
    rows += [
        (f"tokens/s of {count}", partial(_together, count))
        for count in found[names[0]].tokens_per_s
    ]
    rows.append(("/health a second", lambda each: f"{each.health_per_s:.0f}"))
    print("\nwhat clients have of each other\n")
    for label, cell in rows:
        print(f"{label:<32}", *(f"{cell(found[name]):>20}" for name in names))


def _together(count: int, times: ServerTimes) -> str:
    return f"{times.tokens_per_s[count]:.1f}"
