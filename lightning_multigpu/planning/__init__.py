"""Schedules, balance and predictions: pure functions that import neither torch nor Lightning."""
