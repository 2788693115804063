"""Jobs of ranks that take turns, on one host or several."""
