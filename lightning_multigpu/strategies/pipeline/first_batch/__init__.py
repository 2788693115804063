"""The work of a pipeline's first batch: the split of the model, its measurements, and the checks of the step."""
