"""Data parallel training in one process: a replica of the module for each device, each in a thread of its own."""
