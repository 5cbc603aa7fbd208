"""Arrays of any framework on the host: their memory, dtypes and shapes."""
