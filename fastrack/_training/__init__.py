"""Join data sets, loaders, models and checkpoints to the transfers."""
