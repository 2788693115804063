"""Runnable examples on real data; each is a script, and its classes can be named in a configuration file."""
