"""Parts of a strategy that act on a step of the user's module: dry runs, logs, metrics, rates, the plugin's methods."""
