"""Data parallel training: the reduction of gradients, and how batches are dealt out to the ranks."""
