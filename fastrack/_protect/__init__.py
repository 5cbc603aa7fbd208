"""Checkpoints that fail closed: what libraries write of tensors in this process is sealed, or refused."""
