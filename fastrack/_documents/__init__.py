"""Documents: canonical JSON, and the fields that their members and keys are read by."""
