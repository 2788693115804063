"""A run's processes: launchers, joining, process groups, signals, failures, batches and checkpoint files."""
