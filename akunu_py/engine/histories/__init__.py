"""Prompt caches: token histories with their KV caches, in memory and on disk."""
