"""Harm done on purpose: `python -m tests.reliability` hurts the real commands and counts."""
