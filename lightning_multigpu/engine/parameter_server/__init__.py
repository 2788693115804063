"""Parameter servers: the optimizer's update is made in shards, apart from the devices that compute gradients."""
