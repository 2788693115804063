"""The strategies that split layers over ranks."""
