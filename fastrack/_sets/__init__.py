"""Sets of files: their signed manifests, and anchors for the newest version."""
