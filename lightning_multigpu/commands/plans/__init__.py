"""``lightning-multigpu pipeline plan`` and ``tensor plan``."""
