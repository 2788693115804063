"""Time of the training step of one model under several strategies."""
