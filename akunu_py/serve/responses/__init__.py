"""Responses, as OpenAI's clients and Codex speak it: /v1/responses. Nothing is kept of one."""
