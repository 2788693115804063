"""What a run measured, as statistics, as a document and as a table. Pure functions: neither torch nor Lightning."""
