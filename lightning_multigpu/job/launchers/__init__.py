"""Launchers: they start the ranks of a host."""
