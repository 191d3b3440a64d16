"""/infill: the completer's completions in llama.cpp's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.completion.completer import Completer
from akunu_py.completion.request import CompletionRequest
from akunu_py.decoding.events import Event, Finished, PrefillProgress, PromptProcessed, TextDelta
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.serve.dialect import bodies
from akunu_py.serve.dialect.interface import CollectedAnswer, PreparedRequest
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.llamacpp import InfillBody, InfillEncoder, prepare_infill
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.support.complete import complete
from tests.support.jobs import run_job
from tests.support.tiny_fim import sentence_piece, write_model

REQUESTS = Path(__file__).with_name("requests")
MARKERS = ("<PRE>", "<SUF>", "<MID>", "<EOT>")
CODE = st.text("ab (\n", max_size=30)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = write_model(
        tmp_path_factory.mktemp("tiny"), sentence_piece(MARKERS), end=MARKERS[-1]
    )
    return Engine.load(directory)


@pytest.fixture(scope="module")
def service(engine: Engine) -> Service:
    """A service whose requests share a completer."""
    defaults = GenerateOptions(sampling=SamplingOptions(temperature=1.0))
    return Service(engine, "tiny", defaults)


@pytest.fixture(scope="module")
def session(engine: Engine) -> Session:
    return Session(engine)


def parsed(body: dict[str, Any]) -> InfillBody:
    return bodies.parse(json.dumps(body).encode(), InfillBody)


def prepared(service: Service, body: dict[str, Any]) -> PreparedRequest:
    return prepare_infill(parsed(body), service)


def run(service: Service, session: Session, body: dict[str, Any]) -> list[Event]:
    (job,) = prepared(service, body).jobs
    return run_job(job, session)


def whole(service: Service, session: Session, body: dict[str, Any]) -> Any:
    answer = CollectedAnswer()
    for event in run(service, session, body):
        answer.add(event)
    return prepared(service, body).build_reply([answer])


@pytest.mark.long
@settings(max_examples=10)
@given(CODE, CODE, CODE, st.lists(CODE.filter(bool), max_size=1))
def test_text_equals_completer(
    service: Service, session: Session, before: str, typed: str, behind: str, stop: list[str]
) -> None:
    body = {"input_prefix": before, "prompt": typed, "input_suffix": behind, "n_predict": 24}
    expected = complete(
        Completer(service.engine), CompletionRequest(before + typed, behind, max_tokens=24)
    )
    events = run(service, session, body | {"stop": stop})
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    places = [expected.text.find(each) for each in stop if each in expected.text]
    assert text == expected.text[: min(places, default=None)]
    assert isinstance(events[-1], Finished)
    if places:
        assert (events[-1].reason, events[-1].stop) == ("stop", stop[0])
    kinds = [type(event) for event in events if not isinstance(event, PrefillProgress)]
    assert kinds[1:].count(PromptProcessed) == 0
    reply = whole(service, session, body)
    assert reply["content"] == expected.text
    assert reply["stop"] is True


def test_stream_ends_with_statistics(service: Service, session: Session) -> None:
    body = {"input_prefix": "a(", "input_suffix": "b", "n_predict": 9, "stream": True}
    encoder = InfillEncoder(service.name)
    events = run(service, session, body)
    frames = b"".join(frame for event in events for frame in encoder.encode(event, 0))
    values = [
        json.loads(each.removeprefix("data: ")) for each in frames.decode().split("\n\n")[:-1]
    ]
    assert [value["stop"] for value in values] == [False] * (len(values) - 1) + [True]
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    assert [value["content"] for value in values[:-1]] == texts
    assert values[-1]["timings"]["predicted_n"] == values[-1]["tokens_predicted"]


def test_same_seed_gives_same_completion(service: Service, session: Session) -> None:
    body = {"input_prefix": "a", "n_predict": 9, "temperature": 1.0, "seed": 5, "top_k": 20}
    other = Service(service.engine, "tiny", GenerateOptions())
    assert whole(service, session, body)["content"] == whole(other, session, body)["content"]


def requests_of(name: str) -> Iterator[dict[str, Any]]:
    for each in json.loads((REQUESTS / f"{name}.json").read_text(encoding="utf-8")):
        if each["path"] == "/infill":
            yield each["body"]


@pytest.mark.parametrize("name", ["llama.vim", "llama.vscode"])
def test_editors_get_the_fields_they_read(service: Service, session: Session, name: str) -> None:
    for body in requests_of(name):
        reply = whole(service, session, body)
        wanted = [field for field in body.get("response_fields", []) if field]
        if body["n_predict"] and "response_fields" in body:
            assert sorted(reply) == sorted(wanted)
        if "response_fields" not in body:
            assert {"content", "tokens_cached", "truncated", "timings"} <= set(reply)


def test_errors_name_the_parameter(service: Service) -> None:
    with pytest.raises(RequestError, match="n_predict"):
        prepared(service, {"input_prefix": "", "n_predict": "many"})
