"""Training steps of one model under several strategies, timed in turn."""
