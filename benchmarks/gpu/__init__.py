"""One table of checks and figures on the GPUs of a machine: ``python -m benchmarks.gpu``."""
