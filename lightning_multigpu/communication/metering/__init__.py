"""Measurement of the traffic between ranks."""
