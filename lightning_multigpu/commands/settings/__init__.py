"""The settings of a command line and of configuration files, and errors that name the wrong one."""
