"""Connections between the guardians of several hosts."""
