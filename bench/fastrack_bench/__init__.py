"""Predictions of `fastrack plan`, and models and measurements of `fastrack bench` beside the paths of fastrack-io."""
