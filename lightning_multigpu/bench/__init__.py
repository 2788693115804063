"""The benches of ``lightning-multigpu bench``: collectives and strategies."""
