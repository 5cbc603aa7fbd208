"""Open and seal tensors on a CUDA GPU."""
