"""Optional packages, which the extras of fastrack install."""

import importlib


def require(package: str, use: str, extra: str) -> None:
    """Import a package, or raise a `ModuleNotFoundError` with its use and the command that installs it."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"{use} needs {package}, which is not installed: pip install 'fastrack-io[{extra}]'", name=package
        ) from None
