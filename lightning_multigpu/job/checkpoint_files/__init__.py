"""Checkpoint files: complete or absent, and found again."""
