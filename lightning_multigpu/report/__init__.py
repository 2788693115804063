"""The report of a run as statistics, document and table: pure functions without torch and Lightning."""
