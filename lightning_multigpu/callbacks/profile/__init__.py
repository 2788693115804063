"""The profiler report and what it records."""
