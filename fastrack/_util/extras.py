"""Packages that an extra of fastrack installs."""

import importlib


def require(package: str, use: str, extra: str) -> None:
    """Import a package, or raise an error that says what it is for and how to install it.

    Raises
    ------
    ModuleNotFoundError
        If it is not installed.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"{use} takes {package}, which is not installed: pip install 'fastrack-io[{extra}]'", name=package
        ) from None
