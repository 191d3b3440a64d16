"""Whether drafting changes what a model says: whole answers, with drafts and without.

In exact arithmetic it never would. Floating point rounds a pass over several rows otherwise than a
pass over one, and where two tokens are nearly a tie that can decide. So this counts, precision by
precision, how many answers differ, and how near the tie was at the first difference. Owns the
comparison; refuses to time anything.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from akunu_py.bench.contestants import Lent
from akunu_py.bench.identity import Difference, first_difference
from akunu_py.bench.passes import Passes
from akunu_py.engine import Engine
from akunu_py.ngram.cost import CostCurve
from akunu_py.session import Session
from akunu_py.types import DraftMode, GenerateOptions, Message

MODES: tuple[DraftMode, ...] = ("fixed", "auto")


@dataclass(slots=True)
class Fidelity:
    """How many answers of one precision a drafter left as they were.

    weights: the precision, in words. tokens: of the answers without drafts. drafted: tokens that
    were drafted, drafting_passes: passes over more than one row. differences: (prompt, where and
    how the answer first differed).
    """

    weights: str
    mode: DraftMode
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    drafting_passes: int = 0
    differences: list[tuple[str, Difference]] = field(default_factory=list)


def load_prompts(count: int) -> list[str]:
    """The first `count` prompts (300 at most), such that any few of them are of many kinds."""
    text = files(__package__).joinpath("fidelity.toml").read_text(encoding="utf-8")
    whole = tomllib.loads(text)
    tasks, topics = whole["tasks"], whole["topics"]
    # Both turn with each prompt, shifted once per round, so that no pair comes twice.
    pairs = (
        (tasks[at % len(tasks)], topics[(at + at // len(tasks)) % len(topics)])
        for at in itertools.count()
    )
    return [task.format(topic) for task, topic in itertools.islice(pairs, count)]


def compare(
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[list[Fidelity]]:
    """Answers each prompt without drafts and in every mode of `MODES`, and tells after each what
    was found so far: one `Fidelity` a mode, always the same objects."""
    found = [Fidelity(engine.weights, mode) for mode in MODES]
    curve = CostCurve()
    for number, prompt in enumerate(prompts):
        progress(f"{engine.weights}: answer {number + 1} of {len(prompts)}")
        tokens = engine.encode_chat([Message("user", prompt)])
        plain = _answer(engine, curve, tokens, GenerateOptions(max_tokens, "off"))
        for each in found:
            passes = Passes()
            options = GenerateOptions(max_tokens, each.mode)
            said = _answer(engine, curve, tokens, options, passes)
            each.answers += 1
            each.tokens += len(plain)
            each.drafted += sum(passes.drafted)
            each.drafting_passes += sum(count > 0 for count in passes.drafted)
            if difference := first_difference(engine, [(tokens, plain)], [(tokens, said)]):
                each.differences.append((prompt, difference))
        yield found


def _answer(
    engine: Engine,
    curve: CostCurve,
    prompt: list[int],
    options: GenerateOptions,
    passes: Passes | None = None,
) -> list[int]:
    session = Session(engine, Lent(curve))
    if passes is not None:
        session.drafting.watch = passes.watch
    return list(session.generate(prompt, options).answer().tokens)
