"""Scaling: predicted steps of every strategy, from a measured model and a measured machine."""
