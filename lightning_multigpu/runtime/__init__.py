"""A run's processes: launchers, joining, process groups, signals, failures, batches and checkpoint files."""

import lightning.pytorch  # noqa: F401  # first: its import registers all strategies
