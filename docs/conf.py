"""Sphinx's settings for the documentation. `make docs` builds it, and takes warnings for errors."""

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

import fastrack

project = "fastrack"
author = "the fastrack authors"
copyright = author
version = release = fastrack.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
autodoc_mock_imports = ["ray"]  # an extra, whose classes those of fastrack.ray derive from
exclude_patterns = ["_build", "_*.md"]  # tables, which pages include

myst_enable_extensions = ["alert"]  # as GitHub shows them
myst_heading_anchors = 3

# Docstrings name types in their own words, and names in single backticks.
autodoc_typehints = "none"
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"fastrack {version}"
html_static_path = ["_static"]
html_css_files = ["fastrack.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False

# Addresses that pages had, and the pages that have taken them over, whose headings are named as before.
MOVED = {"attestation-setup": "attestation", "costs": "benchmarks", "plan": "benchmarks", "preemption": "distributed"}
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="1; url={page}.html">
<title>Moved</title>
<script>location.replace("{page}.html" + location.hash)</script>
<p>This page is part of <a href="{page}.html">another</a> now.</p>
"""


# The page that takes a sealed file apart uses the reader in JavaScript as it is.
READER = Path(__file__).parent.parent / "tests" / "javascript"
MODULES = ("bytes.mjs", "json.mjs", "message.mjs", "sealed.mjs")


def copy_reader(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for module in MODULES:
            shutil.copy(READER / module, Path(app.outdir, "_static", "sealed-file", module))


def redirect(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for old, page in MOVED.items():
            Path(app.outdir, f"{old}.html").write_text(REDIRECT.format(page=page), encoding="utf-8")


def join_names(_app: Sphinx, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Join the names of attributes that are described as one: of `a, b` Sphinx would take `a,` for the type of `b`."""
    for number, line in enumerate(lines):
        if field := re.match(r":(?:ivar|vartype) [^:]*:", line):
            lines[number] = field[0].replace(", ", ",\N{ZERO WIDTH SPACE}") + line[field.end() :]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", join_names, priority=600)  # after napoleon, which makes fields of sections
    app.connect("build-finished", copy_reader)
    app.connect("build-finished", redirect)
