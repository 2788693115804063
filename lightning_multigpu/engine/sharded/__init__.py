"""Data parallel training with sharded gradients and optimizer states, on FairScale."""
