"""Fetch collateral from the services of Intel, AMD and NVIDIA: the only part that opens connections to them."""
