"""Join datasets, loaders and checkpoints to the transfers."""
