"""OpenAI's Responses API for stateless clients such as Codex: /v1/responses."""
