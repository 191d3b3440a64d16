"""The table of fields that requests of all dialects share, under the names of many servers.

A field that is in no body is unknown: `bodies.parse` drops it and names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field
from pydantic_core import PydanticCustomError

from akunu_py.decoding.chat_format.effort import Effort
from akunu_py.decoding.model.tokens import continues_answer
from akunu_py.serve.dialect.bodies import Body, Ignored
from akunu_py.types import Message

TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


def _check_limit(value: int) -> int:
    if value < 1 and value != -1:
        raise PydanticCustomError("limit", "Expected 1 or more, or -1 for no limit")
    return value


# The maximum number of tokens; -1: no limit.
TokenLimit = Annotated[int, AfterValidator(_check_limit)]


class StructuredOutputs(Body):
    """vLLM's replacement of `guided_*` from 0.12 on."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None  # applies to `response_format`, too


class ThinkingBody(Body):
    """Anthropic's, GLM's and DeepSeek's switch."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class ReasoningBody(Body):
    """The switch of Responses and OpenRouter."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    exclude: bool | None = None  # leave thinking out of the reply
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None


class ThinkingFields(Body):
    """How much a model thinks; see `thinking_plan.py`."""

    thinking: ThinkingBody | None = None
    reasoning: ReasoningBody | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None  # Qwen's and SGLang's switch
    think: bool | Effort | None = None  # Ollama's switch
    # Maximum thinking tokens; -1: no limit. The other names are llama.cpp's and vLLM's.
    thinking_budget: int | None = Field(
        default=None,
        ge=-1,
        validation_alias=AliasChoices(
            "thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget"
        ),
    )
    include_reasoning: bool | None = None  # False: leave thinking out of the reply
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template


class SamplingFields(Body):
    """How tokens are sampled, and how the answer ends."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    do_sample: bool | None = None  # False: greedy, as in transformers
    seed: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    repetition_penalty: float | None = Field(
        default=None,
        ge=0.01,
        le=100,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
    )
    repeat_last_n: int | None = Field(default=None, ge=-1)  # penalized tokens; -1: all, 0: none
    logit_bias: dict[TokenId, float] | None = None
    stop: str | list[str] | None = Field(
        default=None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(
        default=None, ge=0, validation_alias=AliasChoices("min_tokens", "min_new_tokens")
    )
    ignore_eos: bool | None = None  # continue after the end of the answer, up to the limit
    # Structured output: the names of vLLM, llama.cpp (`grammar`, `json_schema`) and Ollama.
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None  # GBNF, or llguidance's dialect of Lark
    json_schema: dict[str, Any] | bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    # These describe the caller, or what always happens here.
    cache_prompt: Ignored = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None


class ConversationFields(Body):
    """Fields of vLLM about a partial answer at the end of the conversation.

    The model always continues it, so other values have no effect.
    """

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def check_continuation(self, messages: list[Message]) -> list[Message]:
        """Return the conversation; report fields that contradict it as ignored."""
        continues = continues_answer(messages)
        if self.continue_final_message not in (None, continues):
            self.ignore("continue_final_message")
        if self.add_generation_prompt not in (None, not continues):
            self.ignore("add_generation_prompt")
        return messages


class GenerationFields(SamplingFields, ThinkingFields):
    """All of these fields."""
