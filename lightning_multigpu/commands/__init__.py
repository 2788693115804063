"""The subcommands of ``lightning-multigpu``: one module each, with a function ``run(name, arguments)``."""
