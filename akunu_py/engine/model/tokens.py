"""Everything about a model's tokens: encoding of text and conversations, end tokens, vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.text.prompt_rewrites import PromptRewrites
from akunu_py.engine.text.thinking import (
    HARMONY,
    HARMONY_ANSWER,
    HARMONY_NEXT,
    HARMONY_THINKING,
    channels_of,
    opens_thinking,
    thinking_markers,
)
from akunu_py.engine.tools import rendering
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.models.load.mlx_loader import load_tokenizer
from akunu_py.models.load.model_files import ModelFiles
from akunu_py.types import Message, Tool, ToolCall

# Checkpoints declare one end token, often that of a chat turn; plain text may end with another.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>",
    # End of a tool call.
    "<|eom_id|>", "<|call|>", "<|observation|>", "<|tool_response>", "<start_function_response>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenCodec:
    """A model's tokenizer and the tokens that end an answer; needs no weights."""

    name: str  # of the model
    path: Path  # of its files
    tokenizer: Any
    stop_tokens: frozenset[int]
    vocabulary: int  # width of the logits
    digest: str  # identifies the tokenizer
    prompt_rewrites: PromptRewrites

    @classmethod
    def load(cls, name: str, files: ModelFiles, vocabulary: int) -> TokenCodec:
        """Load the tokenizer among `files`. Raises what `load_tokenizer` does."""
        tokenizer = load_tokenizer(files, vocabulary)
        find = tokenizer.backend_tokenizer.token_to_id  # building the vocabulary takes 100 ms
        ends = {*tokenizer.all_special_ids} & {find(text) for text in _END_TOKENS}
        stop_tokens = frozenset(ends | tokenizer.eos_token_ids) - {None}
        rewrites = PromptRewrites(
            lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
        )
        return cls(name, files.path, tokenizer, stop_tokens, vocabulary, tokenizer.digest, rewrites)

    def encode(self, text: str) -> list[int]:
        """Encode a raw text, with the beginning-of-text token if the model has one."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def encode_text(self, text: str) -> list[int]:
        """Encode a part of a text."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special tokens included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
    ) -> list[int]:
        """Encode a conversation with the chat template, up to the start of the model's answer.

        The model continues an assistant message at the end, or its thinking if it has no text.
        variables: of the template. Raises UsageError if there is no template, UnsupportedModel if
        it fails.
        """
        if not self.tokenizer.has_chat_template:
            raise UsageError(
                f"{self.name} has no chat template, so it cannot chat; "
                "continue a text instead: akunu run --raw"
            )
        last = messages[-1]
        partial = _is_partial_answer(last) and bool(last.content or last.thinking)
        turns = messages[:-1] if partial else messages
        text = rendering.render(self.tokenizer, turns, tools, self.name, variables)
        text += "" if tools and not partial else rendering.text_header(self.tokenizer, text)
        tokens = self.encode_text(text)
        return tokens + self.encode_text(self._partial_answer(last, text)) if partial else tokens

    def _partial_answer(self, message: Message, prompt: str) -> str:
        """Return the text of a partial answer, with its thinking, behind a rendered `prompt`."""
        content, thinking = message.content, message.thinking
        if channels_of(self.tokenizer) is HARMONY:
            parts = [HARMONY_THINKING + thinking] * bool(thinking)
            parts += [HARMONY_ANSWER + content] * bool(content)
            return (HARMONY.ends[0] + HARMONY_NEXT).join(parts)
        if (markers := thinking_markers(self.tokenizer)) is None:
            return content
        start, end = markers
        opened = opens_thinking(prompt, markers)
        if not opened and (not thinking or prompt.rstrip().endswith(end)):
            return content
        begin = "" if prompt.endswith("\n") else "\n"
        begin = begin if opened else f"{start}\n"
        thinking = thinking.rstrip("\n") if content else thinking
        return f"{begin}{thinking}" + (f"\n{end}\n\n{content}" if content else "")

    def stable_prefix(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
        *,
        side_request: bool = False,
    ) -> int:
        """Return how many tokens of `prompt` the next turn's prompt will begin with.

        Templates drop and rewrite earlier messages, so this renders a next turn. With tools that
        turn is a tool result, the usual case for an agent: some templates drop thinking only after
        the next user message. prompt: `messages`, encoded by `encode_chat`. side_request: the next
        turn does not contain the last message; see `GenerateOptions`.
        """
        if side_request:
            next_turn = [*messages[:-1], Message("user", "Go on.")]
        elif tools:
            call = ToolCall(tools[0].name, "{}", "call00000")
            answer = Message("assistant", "", tool_calls=(call,))
            next_turn = [*messages, answer, Message("tool", "Yes.", tool_call_id=call.id)]
        else:
            next_turn = [*messages, Message("assistant", "Yes."), Message("user", "Go on.")]
        if not side_request and _is_partial_answer(messages[-1]):
            del next_turn[-2]
        try:
            return common_prefix(self.encode_chat(next_turn, tools, variables), prompt)
        except UnsupportedModel:  # the template rejects this conversation
            return 0


def _is_partial_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls
