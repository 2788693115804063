"""The strategies in which servers step the optimizers: on the host, or in separate processes."""
