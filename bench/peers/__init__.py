"""fastrack beside what people use now: ``python -m bench.peers``, or ``make peers`` with all of them installed."""
