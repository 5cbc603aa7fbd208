"""``fastrack plan``, which `fastrack-bench` has."""


def plan() -> None:
    """Predict what transfers, epochs, checkpoints and loading will take."""
