"""Splitting: chains of layers, construction on each rank, and the ranks that hold each tensor."""
