"""Calls that the model must make, or may only make as a schema wants: as a grammar of what it may
write. `tool_choice` "required" and "named" leave nothing but calls, behind the thinking of a
reasoning model; strict tools leave text, and calls that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from akunu_py.decoding.chat_format.conversation import abilities
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.decoding.tool_calls.families import HARMONY, family_of
from akunu_py.decoding.tool_calls.grammar import Wanted, calls_constraint
from akunu_py.decoding.tool_calls.shapes import shape_of
from akunu_py.errors import UsageError
from akunu_py.types import SamplingOptions, Tool, ToolChoice

_BANNED = -1e9  # added to a logit


def constrained(
    codec: TokenCodec,
    sampling: SamplingOptions,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
) -> SamplingOptions:
    """`sampling` with what the choice and strict tools ask for.

    An answer that must match a format is either that or calls; calls alone where they must be made.

    Raises UsageError where that cannot be honoured: an unknown tool, a family whose calls cannot be
    held to a grammar, or a schema of a strict tool that cannot.
    """
    forced = choice.mode in ("required", "named")
    strict = any(tool.strict for tool in tools)
    if choice.mode == "none":
        return _without_calls(codec, sampling) if tools else sampling
    if not (forced or strict or (sampling.constraint is not None and tools)):
        return sampling
    offered = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    if not offered:
        named = f"is no tool {choice.name!r}" if choice.mode == "named" else "are no tools"
        raise UsageError(f"tool_choice {choice.mode!r}: there {named} in this request")
    format = None if forced else sampling.constraint
    if format is not None and format.kind == "grammar":
        raise UsageError("tools: an answer held to a grammar cannot call any; use tool_choice none")
    family = family_of(codec.tokenizer)
    shape = shape_of(family, abilities(codec.tokenizer).template)
    one = choice.mode == "named" or not parallel
    constraint = calls_constraint(codec, shape, Wanted(offered, forced, one, format))
    if constraint is not None:
        return replace(sampling, constraint=constraint)
    if not forced:
        return sampling  # what it calls is not held to the schema
    raise UsageError(
        f"tool_choice {choice.mode!r}: {codec.name} calls tools in a format ({family.name}) that "
        "it cannot be held to; use tool_choice 'auto'"
    )


def _without_calls(codec: TokenCodec, sampling: SamplingOptions) -> SamplingOptions:
    """What opens a call, and nothing else, is not sampled, where that is one token."""
    family = family_of(codec.tokenizer)
    openers = () if family is HARMONY else family.openers
    encoded = [codec.tokenizer.encode(text, add_special_tokens=False) for text in openers]
    banned = tuple((int(tokens[0]), _BANNED) for tokens in encoded if len(tokens) == 1)
    return replace(sampling, logit_bias=sampling.logit_bias + banned)
