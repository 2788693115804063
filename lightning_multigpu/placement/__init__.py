"""Placement: which ranks own and hold each tensor, for all strategies; without Lightning."""
