"""Answers: requests, prefill, the decode loop, and the thread that owns a model."""
