"""Evidence of NVIDIA's GPUs, and the measurements that they should have."""
