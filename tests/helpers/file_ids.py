"""Files that have the id of another, as a holder of the key can make them."""

import os


def fix(patch, file_id):
    """Have files that are made have an id, which is otherwise random, as their salts still are."""
    random = os.urandom
    patch.setattr(os, "urandom", lambda size: bytes.fromhex(file_id) if size == len(file_id) // 2 else random(size))
