"""Tensor parallelism: layers whose weights and work are split over ranks."""
