"""Protect the process before anything is collected."""

import fastrack

fastrack.protect_checkpoints(fastrack.Key.generate())
