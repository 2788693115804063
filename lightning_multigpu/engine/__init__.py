"""The algorithms of each regime in plain torch; they never import Lightning."""
