"""Engine: a loaded model, immutable. Front ends use it through sessions and never touch arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.decoding import device, footprint, kvcache
from akunu_py.decoding.chat_format import chat_template
from akunu_py.decoding.device import lay_out_weights, read_weights
from akunu_py.decoding.draft_model import DraftModel
from akunu_py.decoding.mtp_head import MtpHead, open_head
from akunu_py.decoding.text.thinking import prompt_opens_thinking, thinking_markers
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.decoding.tools import rendering
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.models.load.fit import Fit, Needs, choose_context
from akunu_py.models.load.mlx_loader import load_model, load_tokenizer
from akunu_py.models.load.model_files import boundary
from akunu_py.types import Message, Tool, ToolCall, WeightMode

if TYPE_CHECKING:
    from akunu_py.decoding.hosts.ring import Ring

# Checkpoints name one end token, often that of a chat turn; plain text ends with another.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>",
    # That of a call of a tool, or where its result follows.
    "<|eom_id|>", "<|call|>", "<|observation|>", "<|tool_response>", "<start_function_response>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """A model that is ready to run.

    context_length: tokens that a session may hold: the model's own, or fewer where memory is short.
    vocabulary: the width of the logits. weights: their format in words. load_s: seconds it took to
    load. tokenizer_digest: tells tokenizers apart. no_draft: why this model cannot draft, None
    where it can. recurrent: whether a rejected draft means running accepted tokens again.
    kv_bits: of the KV cache, None where it is not quantized. fit: what the model was expected to
    take, and what the user should know of that. cache_memory: bytes for the KV caches of several
    texts. memory: bytes that model and caches may take in all, None for what there is. forced:
    whether to go on where memory will not do. draft_model: a smaller one that may draft.
    mtp_head: its head for multi-token prediction; no_mtp_head: why there is none. ring: the other
    hosts that have parts of the model, None where this process has all.
    """

    name: str
    path: Path
    model: Any
    tokenizer: Any
    stop_tokens: frozenset[int]
    context_length: int
    vocabulary: int
    weights: str
    load_s: float
    tokenizer_digest: str
    no_draft: str | None
    recurrent: bool
    kv_bits: int | None
    fit: Fit
    cache_memory: int
    memory: int | None = None
    forced: bool = False
    draft_model: DraftModel | None = None
    mtp_head: MtpHead | None = None
    no_mtp_head: str = "it was not looked for"
    ring: Ring | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str | None = None,
        weights: WeightMode = "auto",
        kv_bits: int | None = None,
        context: int | None = None,
        force: bool = False,
        cache_memory: int | None = None,
        memory: int | None = None,
        draft_model: tuple[str, Path] | None = None,
        ring: Ring | None = None,
    ) -> Engine:
        """Loads the model in the directory `path`.

        kv_bits: of the KV cache (None: not quantized). context: tokens that a session shall hold
        at most (None: as many as the model was made for and memory allows). force: load it
        though it will not fit. cache_memory: bytes for the KV caches of several texts (None: what
        the fit leaves). memory: bytes that model and caches may take (None: what there is).
        draft_model: name and directory of a smaller one that may draft. ring: the other hosts that
        have parts of it.

        Raises DamagedModel or UnsupportedModel, whatever its files make mlx-lm raise, UsageError
        where its cache cannot be quantized, its context is smaller than `context` or the draft
        model has other tokens, and DoesNotFit before any weights are read.
        """
        name = name or path.name
        with boundary(f"the model in {path} cannot be loaded"):
            engine = cls._load(
                path, name, weights, kv_bits, context, force, memory, draft_model, ring
            )
        return engine if cache_memory is None else replace(engine, cache_memory=cache_memory)

    @classmethod
    def _load(
        cls,
        path: Path,
        name: str,
        weights: WeightMode,
        kv_bits: int | None,
        context: int | None,
        force: bool,
        memory: int | None,
        draft_model: tuple[str, Path] | None,
        ring: Ring | None,
    ) -> Engine:
        started = time.perf_counter()
        model, config, vocabulary = load_model(path)
        if ring is not None:
            ring.take_share(model)
        most = footprint.own_context(config)
        needs = footprint.needs(model, config, most, weights, kv_bits)
        limit = device.available_memory() if memory is None else memory
        small = DraftModel.open(*draft_model, weights, needs) if draft_model else None
        head, no_head = None, "the model is divided among hosts"
        if ring is None:
            head, no_head = open_head(path, model, config, weights, needs, limit)
        drafting = [each for each in (small, head) if each]
        fit = choose_context(
            name,
            _together(needs, drafting),
            limit,
            requested=context,
            force=force,
            with_8_bits=lambda: (
                None if kv_bits or ring else _with_8_bits(model, config, most, weights, drafting)
            ),
        )
        device.wire_memory(model)
        with ThreadPoolExecutor(1) as other:  # the device reads the weights meanwhile
            loading = other.submit(load_tokenizer, path, config, vocabulary)
            tokens = fit.context
            if ring is None:
                layout = lay_out_weights(model, weights)
            else:
                model, tokens, layout = ring.lead(model, tokens, partial(read_weights, model))
            tokenizer = loading.result()
        cache = kvcache.new_cache(model, kv_bits)
        if small is not None:
            small.check_tokens(name, path, tokenizer)
        for each in drafting:
            each.read_weights(weights)
        if tokenizer.has_chat_template:
            chat_template.start()
        return cls(
            name=name,
            path=path,
            model=model,
            tokenizer=tokenizer,
            stop_tokens=_stop_tokens(tokenizer),
            context_length=tokens,
            vocabulary=vocabulary,
            weights=layout,
            load_s=time.perf_counter() - started,
            tokenizer_digest=tokenizer.digest,
            no_draft=kvcache.why_no_rollback(cache),
            recurrent=kvcache.is_recurrent(cache),
            kv_bits=kv_bits,
            fit=fit,
            cache_memory=fit.cache_memory,
            memory=memory,
            forced=force,
            draft_model=small,
            mtp_head=head,
            no_mtp_head=no_head,
            ring=ring,
        )

    def drafted_by(self, small: Engine) -> Engine:
        """This engine with another one's model as its draft model.

        Raises UsageError where that has other tokens."""
        share = small.fit.needs.weights / max(1, self.fit.needs.weights)
        draft = DraftModel(
            small.name, small.path, small.model, {}, small.vocabulary, small.fit.needs, share
        )
        draft.check_tokens(self.name, self.path, self.tokenizer, small.tokenizer)
        return replace(self, draft_model=draft)

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw text, with the beginning-of-text token where the model has one."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a part of a text."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
    ) -> list[int]:
        """Tokens of a conversation in the model's chat template, up to where its answer starts, or
        continues, where the last message is the beginning of an answer.

        tools: what the model may call; see `rendering`. variables: of the template; see
        `effort`.

        Raises UsageError where there is no template, UnsupportedModel where it fails.
        """
        if not self.tokenizer.has_chat_template:
            raise UsageError(
                f"{self.name} has no chat template, so it cannot chat; "
                "continue a text instead: akunu run --raw"
            )
        begun = messages[-1].content if _is_begun(messages[-1]) else ""
        told = messages[:-1] if begun else messages
        text = rendering.render(self.tokenizer, told, tools, self.name, variables)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return [int(token) for token in [*tokens, *self._encode_begun(tokens, begun)]]

    def stable_prefix(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
    ) -> int:
        """How many tokens of `prompt`, which `encode_chat` made of `messages`, the next turn's will
        begin with: found by rendering one, because templates drop or rewrite what they please.

        With tools that is the result of a call: most turns of an agent are, and a template may keep
        until the user speaks again what it drops then."""
        if tools:
            call = ToolCall(tools[0].name, "{}", "call00000")
            answer = Message("assistant", "", tool_calls=(call,))
            next_turn = [*messages, answer, Message("tool", "Yes.", tool_call_id=call.id)]
        else:
            next_turn = [*messages, Message("assistant", "Yes."), Message("user", "Go on.")]
        if _is_begun(messages[-1]):  # which is continued
            del next_turn[-2]
        try:
            return common_prefix(self.encode_chat(next_turn, tools, variables), prompt)
        except UnsupportedModel:  # it takes no such conversation
            return 0

    def _encode_begun(self, prompt: Sequence[int], begun: str) -> list[int]:
        """The beginning of an answer, behind the thinking that the prompt opens for some models:
        it is left empty, as earlier thinking is no part of a conversation."""
        if not begun:
            return []
        markers = thinking_markers(self.tokenizer)
        if markers is not None and prompt_opens_thinking(self.tokenizer, prompt):
            begun = f"\n{markers[1]}\n\n{begun}"
        return self.encode_text(begun)


def _with_8_bits(
    model: Any,
    config: dict[str, Any],
    context: int,
    weights: WeightMode,
    drafting: Sequence[DraftModel | MtpHead],
) -> Needs | None:
    needs = footprint.needs_with_8_bits(model, config, context, weights)
    return _together(needs, drafting) if needs else None


def _together(needs: Needs, drafting: Sequence[DraftModel | MtpHead]) -> Needs:
    """With what drafts beside the model."""
    for each in drafting:
        needs = needs.beside(each.needs)
    return needs


def _is_begun(message: Message) -> bool:
    """Whether the model is to continue it."""
    return message.role == "assistant" and not message.tool_calls


def _stop_tokens(tokenizer: Any) -> frozenset[int]:
    find = tokenizer.backend_tokenizer.token_to_id  # a dictionary of all takes 100 ms
    special = set(tokenizer.all_special_ids)
    ends = special & {find(text) for text in _END_TOKENS}
    return frozenset(ends | tokenizer.eos_token_ids) - {None}
