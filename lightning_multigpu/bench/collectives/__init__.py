"""Collectives, timed and checked, on every implementation that is there."""
