"""Measurements of a pipeline: costs of layers, memory, links, and what each rank did."""
