"""/infill: its paths, and from a body to a job."""

from __future__ import annotations

from akunu_py.completion.request import (
    MAX_COMPLETION_TOKENS,
    CompleteOptions,
    CompletionRequest,
    SourceFile,
)
from akunu_py.serve.dialect import Dialect, Endpoint, Prepared
from akunu_py.serve.llamacpp.bodies import InfillBody
from akunu_py.serve.llamacpp.job import completion_job
from akunu_py.serve.llamacpp.reply import InfillEncoder, error_body, whole_completion
from akunu_py.serve.sampling import SamplingBody, generate_options
from akunu_py.serve.service import Service


def prepare_infill(body: InfillBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    if body.model and body.model.strip():
        service.check_model(body.model)
    wanted = body.n_predict if body.n_predict >= 0 else MAX_COMPLETION_TOKENS
    request = CompletionRequest(
        body.input_prefix + body.prompt,
        body.input_suffix,
        files=tuple(SourceFile(extra.filename, extra.text) for extra in body.input_extra),
        max_tokens=min(wanted, MAX_COMPLETION_TOKENS),
        temperature=body.temperature,
    )
    defaults = service.defaults
    options = CompleteOptions(draft=defaults.draft, draft_tokens=defaults.draft_tokens)
    asked = SamplingBody(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed if body.seed >= 0 else None,
    )
    job = completion_job(
        lambda session: service.completer(session, options),
        request,
        generate_options(asked, service, 1).sampling,
        tuple(filter(None, body.stop)),
        None if body.t_max_predict_ms is None else body.t_max_predict_ms / 1000,
    )
    return Prepared(
        [job],
        lambda answers: whole_completion(service.name, body.response_fields, answers),
        InfillEncoder(service.name) if body.stream else None,
        short=True,
    )


LLAMACPP = Dialect(
    "llamacpp",
    (Endpoint("/infill", InfillBody, prepare_infill, "Completes at a cursor."),),
    error_body,
)
