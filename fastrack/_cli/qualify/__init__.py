"""``fastrack qualify``: attack a sealed folder on the machine that will serve it, row by row."""
