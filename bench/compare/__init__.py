"""Is the working tree slower than a revision? ``make bench-compare BASE=<revision>`` runs it."""
