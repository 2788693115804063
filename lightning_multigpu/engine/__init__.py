"""Training algorithms of each strategy in plain torch; they never import Lightning."""
