"""``lightning-multigpu plan`` and its two views."""
