"""``lightning-multigpu plan``."""
