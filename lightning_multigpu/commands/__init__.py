"""The subcommands of ``lightning-multigpu``: a module for each, with a function ``run(name, arguments)``.

It returns the exit status, which is 0 if nothing else is said. It raises :class:`.UsageError` where an option, a file
or a setting is wrong, before any process is started where that is possible, and ``SystemExit`` for ``--help``.
"""
