"""Sets of files: what is in them, who published it, and which version is the newest."""
