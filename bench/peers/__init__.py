"""fastrack against other libraries: ``python -m bench.peers``, or ``make peers`` with all of them installed."""
