"""The CUDA device, which opens and seals tensors on an NVIDIA GPU."""
