"""``fastrack attest``: give keys to a machine that proves what it is."""
