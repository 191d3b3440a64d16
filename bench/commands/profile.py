"""`akunu bench profile`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format, add_model
from akunu_py.bench.commands.output import exit_code, progress, show, was_interrupted
from akunu_py.bench.workloads import load_workloads
from akunu_py.types import DRAFT_MODES, LoadOptions

SUMMARY = "where the time of a pass goes"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.profile import STAGES, Profile, profile_workload
    from akunu_py.bench.report.printing import print_profiles
    from akunu_py.bench.result import describe_machine, describe_model, today
    from akunu_py.decoding.load import load_engine

    workloads = load_workloads(options.workload)
    engine = load_engine(options.model, LoadOptions(options.weights))
    profiles: list[Profile] = []

    def measure() -> None:
        for workload in workloads:
            one = profile_workload(
                engine, workload, options.draft, options.max_tokens, options.repeats, progress
            )
            profiles.append(one)

    interrupted = was_interrupted(measure)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "model": describe_model(engine),
        "machine": describe_machine(),
        "draft": options.draft,
        "profiles": [asdict(each) for each in profiles],
    }
    show(options, as_json, lambda: print_profiles(profiles, STAGES))
    return exit_code(interrupted)
