"""Collectives between the ranks of one host, through memory that they share."""
