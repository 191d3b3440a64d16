"""What editors post to /infill."""

from __future__ import annotations

from pydantic import Field

from akunu_py.serve.bodies import Body, Ignored


class ExtraBody(Body):
    """A piece of another file. llama.vim has it without a name, too."""

    text: str
    filename: str = ""
    time: Ignored = None


class InfillBody(Body):
    """The buffer is input_prefix, prompt, the cursor, input_suffix. n_predict: 0 to only read,
    below 0 for as many as may be. A completion is greedy unless `temperature` is above 0; what
    comes then of top_k and its like is as with a chat. t_max_predict_ms: once it has a whole line,
    so long after its first token. response_fields: what of the reply is wanted."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[ExtraBody] = Field(default=[])
    model: str | None = None
    n_predict: int = -1
    stream: bool = False
    stop: list[str] = Field(default=[])
    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int | None = None
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int = -1
    t_max_predict_ms: float | None = None
    response_fields: list[str] | None = None
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    n_indent: Ignored = None
    n_probs: Ignored = None
    samplers: Ignored = None
    t_max_prompt_ms: Ignored = None  # neither does llama.cpp stop reading: the next one would too
