"""What ends a comparison without a result."""


class CannotCompareError(Exception):
    """There is no comparison to be had; the message says what to do."""
