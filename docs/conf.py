"""Sphinx's settings for the documentation. `make docs` builds it, and takes warnings for errors."""

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
