"""Messages of a divided model: `python -m tests.reliability.hosts_messages [WORKLOAD ...]`.

The starter among 3 processes over loopback answers what it was recorded to answer in one (see
README), with drafting and without. Prints for each answer whether it is that one, its tokens, and
the messages of rank 0: all of them, and without those of the prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from unittest import mock

from akunu_py.bench.trace import load_trace
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.hosts.passes import Coordinator
from akunu_py.decoding.load import load_engine
from akunu_py.types import DraftMode, GenerateOptions, LoadOptions
from tests.support.patient_ranks import patient_ranks

_TRACES = Path(__file__).parents[2] / "bench/results/2026-11-21-starter-traces.json.gz"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=["edit"])
    args = parser.parse_args()
    with patient_ranks():
        engine = load_engine("starter", LoadOptions(hosts="3"))
    assert engine.host_group is not None
    wrong = 0
    modes: tuple[DraftMode, ...] = ("auto", "off")
    for name in args.workloads:
        for item in load_trace(_TRACES).workloads[name]:
            for mode in modes:
                options = GenerateOptions(max_tokens=len(item.output), draft=mode)
                before, filled = engine.host_group.messages, 0
                with mock.patch.object(
                    Coordinator, "prefill", autospec=True, side_effect=Coordinator.prefill
                ) as f:
                    answer = Session(engine).generate(item.prompt, options).answer()
                    filled = f.call_count
                sent, tokens = engine.host_group.messages - before, len(answer.tokens)
                same = tuple(answer.tokens) == item.output[:tokens]
                wrong += not same
                shown = {
                    "workload": name,
                    "draft": mode,
                    "same": same,
                    "tokens": tokens,
                    "passes": answer.stats.target_passes,
                    "messages": sent,
                    "of the prompt": filled,
                    "a token": round(sent / tokens, 3),
                }
                print(json.dumps(shown), flush=True)
    engine.host_group.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
