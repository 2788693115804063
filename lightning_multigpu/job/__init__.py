"""A job's processes: launching, joining, failing and ending; batches and checkpoint files of a run.

``guardian/`` is the process that watches a host's ranks. It needs the standard library alone, so this module imports
nothing.
"""
