"""The tokenizer side of a model: text and conversations to tokens, end tokens, vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.decoding.text.thinking import prompt_opens_thinking, thinking_markers
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.decoding.tools import rendering
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.models.load.mlx_loader import load_tokenizer
from akunu_py.models.load.model_files import ModelFiles
from akunu_py.types import Message, Tool, ToolCall

# Checkpoints name one end token, often that of a chat turn; plain text ends with another.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>",
    # That of a call of a tool, or where its result follows.
    "<|eom_id|>", "<|call|>", "<|observation|>", "<|tool_response>", "<start_function_response>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenCodec:
    """What is known of a model's tokens without its weights."""

    name: str  # of the model
    path: Path  # of its files
    tokenizer: Any
    stop_tokens: frozenset[int]
    vocabulary: int  # width of the logits
    digest: str  # tells tokenizers apart

    @classmethod
    def load(cls, name: str, files: ModelFiles, vocabulary: int) -> TokenCodec:
        """Load the tokenizer among `files`. Raises what `load_tokenizer` does."""
        tokenizer = load_tokenizer(files, vocabulary)
        stop_tokens = _stop_tokens(tokenizer)
        return cls(name, files.path, tokenizer, stop_tokens, vocabulary, tokenizer.digest)

    def encode(self, text: str) -> list[int]:
        """Encode a raw text, with the beginning-of-text token where the model has one."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def encode_text(self, text: str) -> list[int]:
        """Encode a part of a text."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
    ) -> list[int]:
        """Encode a conversation with the chat template, up to where the model's answer starts.

        An assistant message at the end is the beginning of that answer. tools: what the model may
        call. variables: of the template. Raises UsageError if there is no template,
        UnsupportedModel if it fails.
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
        """Return how many tokens of `prompt` the next turn's prompt will begin with.

        A next turn is rendered, because templates drop or rewrite what they please. With tools it
        is the result of a call: most turns of an agent are, and a template may keep until the user
        speaks again what it drops then. prompt: `messages`, encoded by `encode_chat`.
        """
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
        """Encode the beginning of an answer, behind an empty thinking block if the prompt opens
        one: earlier thinking is no part of a conversation."""
        if not begun:
            return []
        markers = thinking_markers(self.tokenizer)
        if markers is not None and prompt_opens_thinking(self.tokenizer, prompt):
            begun = f"\n{markers[1]}\n\n{begun}"
        return self.encode_text(begun)


def _is_begun(message: Message) -> bool:
    """Whether the model is to continue it."""
    return message.role == "assistant" and not message.tool_calls


def _stop_tokens(tokenizer: Any) -> frozenset[int]:
    find = tokenizer.backend_tokenizer.token_to_id  # a dictionary of all takes 100 ms
    special = set(tokenizer.all_special_ids)
    ends = special & {find(text) for text in _END_TOKENS}
    return frozenset(ends | tokenizer.eos_token_ids) - {None}
