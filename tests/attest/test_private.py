"""Files of the package share public names alone."""

import ast
from pathlib import Path

from fastrack import attest


def test_no_file_imports_a_private_name_of_another():
    folder = Path(attest.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("fastrack.attest."):
                assert not [each.name for each in node.names if each.name.startswith("_")], (path.name, node.lineno)
