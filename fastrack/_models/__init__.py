"""Open the weights of models: at once, as they are used, or in the place of others."""
