"""Copies of the checkout, which may be changed even if it cannot be."""

import shutil


def copy_tree(source, target, *ignored):
    """Copy a folder, but for files and folders of these names, and return the copy."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", *ignored))
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    return target
