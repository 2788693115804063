"""Hang reports: which ranks wait, for whom, and where those are."""
