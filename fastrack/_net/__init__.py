"""HTTP to servers and services: addresses, connections, one exchange with an end to all waiting, and another try."""
