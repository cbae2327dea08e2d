"""Sphinx: `make docs` builds these pages as HTML."""

from __future__ import annotations

from speedtorch.version import __version__

project = "speedtorch"
author = "speedtorch authors"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = f"speedtorch {release}"
html_show_copyright = False
exclude_patterns = ["_build"]
myst_heading_anchors = 3
default_role = "literal"  # the role of single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# Docstrings have Google style, as in torch.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
