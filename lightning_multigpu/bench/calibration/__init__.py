"""Calibration of the machine for plans: kernels, transfers, and steps of reference models."""
