"""Sphinx's configuration of the documentation site, which `infra/build_site` builds.

The site's source is the whole checkout, so a page has the same path on the site as in the repository, and links between
Markdown files work in both. The API reference is made from docstrings.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

project = "Maskfleet"
version = release = PROJECT["version"]
author = "the authors of Maskfleet"
project_copyright = "the authors of Maskfleet, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "infra/site/contents"
include_patterns = ["*.md", *(f"{top}/**.md" for top in ("infra", "launcher", "checkpoints"))]
include_patterns += [f"{top}/**.md" for top in ("data_service", "encoder_core", "tests")]
exclude_patterns = [".*", "build", "dist", "**/__pycache__", "tests/support/**/data"]
myst_heading_anchors = 4

nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!maskfleet\.).*")]  # types of other packages have no page here
default_role = "code"  # docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "Maskfleet"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["style.css"]
html_css_files = ["style.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}
html_sidebars = {"index": [], "**": ["pages.html"]}
html_theme_options = {
    "navbar_start": ["home.html"],
    "navbar_center": [],
    "navbar_persistent": [],
    "navbar_end": ["search-button-field", "theme-switcher"],
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def _to_rest(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn indented examples in a docstring, which is plain text, into code blocks of reStructuredText."""
    text = re.sub(r"^(?=\S)(.*)\n\n(?=    \S)", r"\1\n\n::\n\n", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _to_rest, priority=100)  # runs before napoleon, whose priority is 500
