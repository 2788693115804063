"""Collectives and strategies, timed: the work of ``lightning-multigpu bench``."""
