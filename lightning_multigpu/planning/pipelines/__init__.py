"""Balance, schedules and predictions of pipelines."""
