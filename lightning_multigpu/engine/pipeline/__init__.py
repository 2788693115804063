"""Pipelines: splitting a chain of layers into stages, and running torch's schedules around an unmodified step."""
