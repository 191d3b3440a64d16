"""The engine: load, read prompts, draft, verify, roll back, sample, text."""
