"""Pipelines: splitting a chain of layers into stages, and running its schedules around an unmodified step."""
