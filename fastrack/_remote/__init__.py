"""Files on servers: read by ranges, which are kept on the local disk, and written in parts."""
