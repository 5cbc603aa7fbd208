"""Move tensors, sealed or plain, to a device and back."""
