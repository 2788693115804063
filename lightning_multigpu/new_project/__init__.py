"""The files that ``lightning-multigpu new`` writes; none of them is imported from here."""
