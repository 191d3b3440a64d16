"""What each action of `akunu bench` runs: it loads, measures, prints, and returns an exit code.

Every action imports for itself what it needs, so that one that runs no model loads no MLX.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.workloads import load_workloads
from akunu_py.errors import INTERRUPTED, UsageError
from akunu_py.text import rewrite_line
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.bench.curve import Curve
    from akunu_py.bench.networks import NetworkFigures
    from akunu_py.bench.result import Result
    from akunu_py.bench.trace import Trace
    from akunu_py.decoding.engine import Engine

FAILED = 1  # the exit code where B is slower than A, and where a README disagrees
# On a processor a token takes seconds in the formats that checkpoints have: see `bench.fidelity`.
GPU_PRECISIONS = ("float32", "bfloat16", "keep")
CPU_PRECISIONS = ("float32", "bfloat16", "keep-float32", "bfloat16-blas", "keep-blas")
_SUFFIXES = (".html", ".md", ".txt")


def speed(options: argparse.Namespace) -> int:
    from akunu_py.bench.report.printing import print_speed
    from akunu_py.bench.speed import Plan, Setup, run_speed
    from akunu_py.decoding.load import load_engine

    by_length = any(options.n_prompt) or any(options.n_gen)
    wanted = options.workload or (["none"] if by_length else None)
    workloads = [] if wanted == ["none"] else load_workloads(wanted)
    if not workloads and not by_length:
        raise UsageError("nothing to measure: name a workload, or lengths with -p and -n")
    engine = load_engine(options.model, LoadOptions(options.weights))
    small = (
        load_engine(options.draft_model, LoadOptions(options.weights))
        if options.draft_model
        else None
    )
    setup = Setup(
        options.draft or ["off", "fixed", "auto"],
        [options.draft_tokens],
        small,
        options.llama_cpp,
        options.transformers,
    )
    plan = Plan(
        workloads,
        options.temperature or [0.0],
        options.max_tokens,
        options.repeats,
        prompts=options.n_prompt,
        generates=options.n_gen,
        depths=options.n_depth,
        memory_from=options.memory_from,
    )
    result = run_speed(engine, setup, plan, options.command_line, _progress)
    if options.output:
        result.save(options.output)
    print_speed(result, options.format)
    return _exit_code(not result.complete)


def replay(options: argparse.Namespace) -> int:
    from akunu_py.bench.networks import parse_network
    from akunu_py.bench.replay import COMPARED, replay_trace
    from akunu_py.bench.report.printing import print_replay, print_replays
    from akunu_py.bench.trace import load_trace

    if options.record:
        return _record(options)
    if not options.file:
        raise UsageError("expected a trace file: akunu bench replay TRACES (--record makes one)")
    curve = parse_curve(options.curve)
    if options.latency:
        curve = curve.behind(options.latency / options.step)
        options.curve += f" + {options.latency:g} ms for the network a step of {options.step:g} ms"
    trace = load_trace(options.file)
    if unknown := sorted(set(options.workload or ()) - set(trace.workloads)):
        there = ", ".join(trace.workloads)
        raise UsageError(f"no workload {', '.join(unknown)} in the trace; there are: {there}")
    networks = [parse_network(text) for text in options.network or ()]
    if options.device is not None:
        return _replay_on_device(options, curve, trace, networks)
    found = {
        drafter: replay_trace(
            trace,
            curve,
            drafter,
            workloads=options.workload or (),
            draft_tokens=options.draft_tokens,
            memory=options.memory,
            networks=networks,
        )
        for drafter in (COMPARED if options.compare else (options.draft,))
    }
    name, draft = options.curve, options.draft
    if options.compare:
        _show(options, {"curve": name, "drafters": found}, lambda: print_replays(name, found))
    else:
        as_json = {"curve": name, "draft": draft, "workloads": found[draft]}
        _show(options, as_json, lambda: print_replay(name, draft, found[draft]))
    return 0


def serve(options: argparse.Namespace) -> int:
    from akunu_py.bench.serve import compare_servers, print_servers
    from akunu_py.models import store

    found = compare_servers(
        store.resolve(options.model).path,
        options.layers,
        options.words,
        options.max_tokens,
        options.clients,
        _progress,
    )
    as_json = {name: asdict(each) for name, each in found.items()}
    _show(options, as_json, lambda: print_servers(found))
    return 0


def caches(options: argparse.Namespace) -> int:
    from akunu_py.bench.caches import compare_policies, print_policies
    from akunu_py.bench.trace import load_trace

    found = compare_policies(
        load_trace(options.file), options.budget, options.agents, options.repeats
    )
    _show(options, found, lambda: print_policies(found))
    return 0


def _replay_on_device(
    options: argparse.Namespace, curve: Curve, trace: Trace, networks: Sequence[NetworkFigures]
) -> int:
    from akunu_py.bench import device
    from akunu_py.bench.report.printing import print_replay

    if options.compare:
        raise UsageError("--device and --compare do not go together; use --draft")
    found = device.replay_on_device(
        trace,
        curve,
        options.draft,
        device.parse_device(options.device),
        workloads=options.workload or (),
        draft_tokens=options.draft_tokens,
        memory=options.memory,
        figures=networks,
    )
    name = f"{options.curve} on a device ({options.device or 'ideal'})"
    as_json = {
        "curve": options.curve,
        "draft": options.draft,
        "device": options.device,
        "workloads": found,
    }
    _show(options, as_json, lambda: print_replay(name, options.draft, found))
    return 0


def _record(options: argparse.Namespace) -> int:
    from akunu_py.bench.trace import read_prompts, record
    from akunu_py.decoding.load import load_engine

    prompts = read_prompts(options.prompts) if options.prompts else load_workloads()
    engine = load_engine(options.model, LoadOptions(options.weights))
    count = record(engine, prompts, Path(options.record), options.max_tokens, _print_line)
    print(f"{options.record}: {count} tokens in answers to {len(prompts)} prompts")
    return 0


def curve(options: argparse.Namespace) -> int:
    from akunu_py.bench import curve
    from akunu_py.bench.report.printing import print_curve
    from akunu_py.decoding.load import load_engine

    engine = load_engine(options.model, LoadOptions(options.weights))
    context = options.context or curve.CONTEXT
    costs = curve.measure_curve(engine, range(1, 33), options.repeats, context)
    found = curve.as_dict(engine, costs, context)
    _show(options, found, lambda: print_curve(curve.describe_setup(engine), costs, found))
    return 0


def early_exit(options: argparse.Namespace) -> int:
    from akunu_py.bench.report.printing import print_exits
    from akunu_py.decoding.load import load_engine
    from akunu_py.decoding.networks import exit as first_layers

    engine = load_engine(options.model, LoadOptions(options.weights))
    chosen = first_layers.choose(engine)
    exits = first_layers.measure(engine, range(1, len(engine.model.layers)))
    found = {"chosen": chosen.layers, "exits": [each.as_dict() for each in exits]}
    _show(options, found, lambda: print_exits(found))
    return 0


def theory(options: argparse.Namespace) -> int:
    from akunu_py.bench import theory
    from akunu_py.bench.report.printing import print_theory
    from akunu_py.bench.result import load_results, merged

    results = (
        merged([each for file in options.files for each in load_results(file)])
        if options.files
        else [_measure_fixed(options)]
    )
    interrupted = not options.files and not results[0].complete
    results = [result for result in results if theory.predict(result)]
    if not results and not interrupted:
        raise UsageError(
            "no run with fixed drafts to compare the theory with; make one with: akunu bench theory"
        )
    found = [theory.as_dict(result) for result in results]

    def print_all() -> None:
        for result, each in zip(results, found, strict=True):
            print_theory(result, each)

    _show(options, found[0] if len(found) == 1 else found, print_all)
    return _exit_code(interrupted)


def _measure_fixed(options: argparse.Namespace) -> Result:
    """Drafts of the lengths that were asked for."""
    from akunu_py.bench.speed import Plan, Setup, run_speed
    from akunu_py.decoding.load import load_engine

    if 0 in options.draft_tokens:
        raise UsageError("--draft-tokens: expected drafts of 1 token or more")
    workloads = load_workloads(options.workload)
    plan = Plan(workloads, options.temperature or [0.0], options.max_tokens, options.repeats)
    engine = load_engine(options.model, LoadOptions(options.weights))
    setup = Setup(["fixed"], options.draft_tokens)
    result = run_speed(engine, setup, plan, options.command_line, _progress)
    if options.output:
        result.save(options.output)
    return result


def fidelity(options: argparse.Namespace) -> int:
    from akunu_py.bench import fidelity
    from akunu_py.bench.report.printing import print_fidelity
    from akunu_py.bench.result import describe_machine, today
    from akunu_py.decoding.device import on_metal

    prompts = fidelity.load_prompts(options.answers)
    comparisons = fidelity.load_comparisons(options.keep) if options.keep else []
    precisions = options.weights or (GPU_PRECISIONS if on_metal() else CPU_PRECISIONS)

    def measure() -> None:
        fidelity.compare_precisions(
            options.model,
            precisions,
            prompts,
            options.max_tokens,
            comparisons,
            options.keep,
            _progress,
            options.kv_bits,
            options.temperature,
        )

    interrupted = _interrupted(measure)
    summaries = fidelity.summarize(comparisons)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "machine": describe_machine(),
        "fidelity": [each.as_dict() for each in summaries],
    }
    _show(options, as_json, lambda: print_fidelity(summaries))
    return _exit_code(interrupted, "compared")


def profile(options: argparse.Namespace) -> int:
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
                engine, workload, options.draft, options.max_tokens, options.repeats, _progress
            )
            profiles.append(one)

    interrupted = _interrupted(measure)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "model": describe_model(engine),
        "machine": describe_machine(),
        "draft": options.draft,
        "profiles": [asdict(each) for each in profiles],
    }
    _show(options, as_json, lambda: print_profiles(profiles, STAGES))
    return _exit_code(interrupted)


def complete(options: argparse.Namespace) -> int:
    from akunu_py.bench.completion import measure_completion
    from akunu_py.bench.report.printing import print_completion
    from akunu_py.completion.types import CompleteOptions
    from akunu_py.decoding.load import load_engine

    if options.oracle:
        return _score_rules(options)
    curve = parse_curve(options.curve)
    engine = load_engine(options.model, LoadOptions(options.weights))
    if options.definitions:
        return _find_definitions(options, engine)
    complete_options = CompleteOptions(fim=options.fim)
    measured = measure_completion(engine, complete_options, curve, options.live, _progress)
    _progress("")
    found = {"model": engine.name, "curve": options.curve} | measured
    _show(options, found, lambda: print_completion(found))
    return 0


def _score_rules(options: argparse.Namespace) -> int:
    """The exit code is 1 where the goals are missed."""
    from akunu_py.bench.oracle import score
    from akunu_py.bench.report.printing import print_fault, print_oracle

    on_fault = print_fault if options.faults else score.ignore_fault
    scores = score.score_directory(options.oracle, options.places, _progress, on_fault)
    _progress("")
    if not scores:
        raise UsageError(f"no source files in {options.oracle}; there may be *.py, *.js, *.go, ...")
    found = score.as_dict(scores)
    _show(options, found, lambda: print_oracle(found))
    return 0 if found["reached"] else 1


def structured(options: argparse.Namespace) -> int:
    from akunu_py.bench import structured
    from akunu_py.bench.report.printing import print_structured
    from akunu_py.decoding.load import load_engine

    curve = parse_curve(options.curve)
    cases = structured.load_instances(options.file) if options.file else structured.load_cases()
    measure = structured.replay_instances if options.file else structured.measure_structured
    engine = load_engine(options.model, LoadOptions(options.weights))
    sources = measure(engine, cases, curve, options.max_tokens, _progress)
    _progress("")
    found = {"model": engine.name, "curve": options.curve, "sources": sources}
    _show(options, found, lambda: print_structured(found))
    return 0


def _find_definitions(options: argparse.Namespace, engine: Engine) -> int:
    from akunu_py.bench.oracle.definitions import BUDGETS, measure_definitions
    from akunu_py.bench.report.printing import print_definitions
    from akunu_py.completion.tokens import CodeTokens

    code = CodeTokens(engine.tokenizer, engine.vocabulary)
    found = measure_definitions(options.definitions, lambda text: len(code.encode(text)), _progress)
    _progress("")
    if not found:
        raise UsageError(f"no calls of other files' functions in {options.definitions}")
    as_json = {"budgets": BUDGETS, "languages": found}
    _show(options, as_json, lambda: print_definitions(BUDGETS, found))
    return 0


def chat(options: argparse.Namespace) -> int:
    from akunu_py.bench.chat import ChatBench, ChatOptions, ChatResult
    from akunu_py.bench.report.printing import print_chat
    from akunu_py.bench.result import describe_machine, today
    from akunu_py.models import store

    (workload,) = load_workloads([options.workload])
    model = store.resolve(options.model)
    store.check(model)
    chat_options = ChatOptions(
        model.path.absolute(),
        workload.turns[-1].user,
        options.repeats,
        options.max_tokens,
        options.keys,
        options.long,
        options.draft,
        options.weights,
        options.force,
    )
    result = ChatResult()
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        bench = ChatBench(chat_options, Path(directory), _progress)
        interrupted = _interrupted(lambda: bench.measure(result))
    as_json = {
        "command": options.command_line,
        "date": today(),
        "model": model.name,
        "draft": options.draft,
        "machine": describe_machine(),
    }
    as_json |= result.as_dict()
    _show(options, as_json, lambda: print_chat(model.name, options.draft, result))
    return _exit_code(interrupted)


def check(options: argparse.Namespace) -> int:
    from akunu_py.bench import check
    from akunu_py.bench.report.pages import check_to_html
    from akunu_py.bench.report.printing import print_check
    from akunu_py.bench.result import json_text, write_text

    models = check.choose_models(options.model or [])
    found = check.Check(options.command_line)
    interrupted = _interrupted(
        lambda: check.run_check(models, check.default_plan(), found, _progress)
    )
    page = options.output.with_suffix(".html")
    write_text(options.output, json_text(found.as_dict()), parents=True)
    write_text(page, check_to_html(found))
    _show(options, found.as_dict(), lambda: print_check(found))
    print(f"{options.output}: every figure; {page}: the same to read", file=sys.stderr)
    return _exit_code(interrupted, "checked") or FAILED * found.failed


def report(options: argparse.Namespace) -> int:
    if options.readme:
        return _readme(options.readme, check=options.check)
    from akunu_py.bench.report import pages
    from akunu_py.bench.result import load_results, merged, write_text

    if not options.files:
        raise UsageError("expected result files: akunu bench report FILE ... (akunu bench -o FILE)")
    results = merged([each for file in options.files for each in load_results(file)])
    if not options.output:
        print(pages.to_text(results))
        print(pages.to_markdown(results), end="")
        return 0
    writers = dict(zip(_SUFFIXES, (pages.to_html, pages.to_markdown, pages.to_text), strict=True))
    if wrong := [out for out in options.output if Path(out).suffix not in writers]:
        raise UsageError(f"expected -o with {', '.join(_SUFFIXES)}, found {wrong[0]}")
    for out in options.output:
        write_text(Path(out), writers[Path(out).suffix](results))
        print(out, file=sys.stderr)
    return 0


def _readme(path: Path, *, check: bool) -> int:
    from akunu_py.bench.report.readme import regenerate
    from akunu_py.bench.result import write_text

    text = regenerate(path)
    if text == path.read_text(encoding="utf-8"):
        return 0
    if check:
        print(
            f"akunu bench: the tables in {path} are not those of their result files; "
            f"make them again with: akunu bench report --readme {path}",
            file=sys.stderr,
        )
        return FAILED
    write_text(path, text)
    return 0


def compare(options: argparse.Namespace) -> int:
    from akunu_py.bench.compare import any_slower, compare
    from akunu_py.bench.report.printing import print_comparisons
    from akunu_py.bench.result import load_result, to_file_keys

    comparisons = compare(
        [load_result(Path(options.before))],
        [load_result(Path(options.after))],
        threshold=options.threshold,
        alpha=options.alpha,
        against_baseline=options.against_baseline,
    )
    if not comparisons:
        raise UsageError(
            f"{options.before} and {options.after} have no test and loop in common; "
            "measure both with the same options of akunu bench"
        )
    slower = any_slower(comparisons)
    rows = [to_file_keys(asdict(comparison)) for comparison in comparisons]
    unit = "x plain" if options.against_baseline else "t/s"
    _show(
        options,
        {"slower": slower, "comparisons": rows},
        lambda: print_comparisons(comparisons, unit, slower),
    )
    return FAILED if slower else 0


def _progress(line: str) -> None:
    """Shows what is being measured: one line that changes on a terminal, one each elsewhere."""
    if sys.stderr.isatty():
        rewrite_line(line)
    elif line:
        _print_line(line)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(options: argparse.Namespace, as_json: Any, print_text: Callable[[], None]) -> None:
    """Prints a result in the format that was asked for."""
    if options.format == "json":
        print(json.dumps(as_json, indent=1))
    else:
        print_text()


def _interrupted(measure: Callable[[], None]) -> bool:
    """Runs `measure`. True where Ctrl-C ended it: what it collected until then is a result."""
    interrupted = False
    try:
        measure()
    except KeyboardInterrupt:
        interrupted = True
    _progress("")
    return interrupted


def _exit_code(interrupted: bool, done: str = "measured") -> int:
    if interrupted:
        print(f"interrupted: this is what was {done} so far", file=sys.stderr)
    return INTERRUPTED if interrupted else 0
