"""Workarounds for other libraries: one module each, with its reason and when it can go."""
