"""Paged memory of devices: KV caches of servers, whose blocks lie in pieces."""
