"""Files on servers: read by ranges that are kept on the local disk, and written in parts."""
