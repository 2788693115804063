"""The subcommands of ``lightning-multigpu``: a module for each, with a function ``run(name, arguments)``."""
