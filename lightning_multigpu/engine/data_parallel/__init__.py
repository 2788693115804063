"""Data parallel training: transport of gradients and distribution of batches."""
