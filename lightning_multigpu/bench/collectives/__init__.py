"""Time and correctness of collectives on every available implementation."""
