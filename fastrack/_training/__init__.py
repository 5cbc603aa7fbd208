"""Join data sets, loaders and checkpoints to the transfers."""
