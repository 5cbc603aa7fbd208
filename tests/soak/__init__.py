"""Threads that move everything everywhere for minutes, while things go wrong on purpose. `make soak` runs it."""
