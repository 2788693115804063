"""The pipeline strategy."""
