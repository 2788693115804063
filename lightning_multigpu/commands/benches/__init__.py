"""``lightning-multigpu bench``: its two benches and their common options."""
