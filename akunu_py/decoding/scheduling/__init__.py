"""Scheduling of concurrent requests on one model."""
