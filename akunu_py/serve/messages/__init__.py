"""Messages, as Anthropic's clients speak it: /v1/messages and /v1/messages/count_tokens."""
