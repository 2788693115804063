"""Examples on real data: scripts, a notebook, and classes that can be named in a configuration file."""
