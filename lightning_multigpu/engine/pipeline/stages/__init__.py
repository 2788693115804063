"""The stages of a pipeline at work: schedules, messages, forward and backward."""
