"""Sphinx configuration of the documentation site: `make docs` builds it into ``artifacts/docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generated_pages
from docutils.nodes import SkipNode
from latex2mathml.converter import convert

from shardscope import __version__

project = "Shardscope"
author = "The Shardscope authors"
copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["site", "generated/parts"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
# Not prices: "$2" is text.
myst_dmath_allow_digits = False
myst_dmath_allow_space = False
html_math_renderer = "mathml"
# Anchors of headings, as GitHub makes them: the pages are read there too.
myst_heading_anchors = 3

# Pages with code cells are executed at build. Notebooks are not: `make test-notebooks` does that.
nb_execution_mode = "force"
nb_execution_excludepatterns = ["generated/tutorials/*"]
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_merge_streams = True
# Views are shown as their saved pictures: no kernel runs here, no script comes from another machine.
nb_ipywidgets_js: dict[str, Any] = {}
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "Shardscope"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# A summary would be fetched from the page found, which browsers forbid from file://.
html_show_search_summary = False
html_theme_options = {
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

_ROOT_PAGE = re.compile(r"\]\(\.\./(\w+)\.md(#[\w-]+)?\)")


def link_project_pages(app: Any, docname: str, source: list[str]) -> None:
    """Point links to pages of the repository's root, such as SECURITY.md, to their copies in the site."""
    if "/" not in docname:
        source[0] = _ROOT_PAGE.sub(r"](generated/project/\1.md\2)", source[0])


def write_inline_math(self: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without MathJax: no script and no font to load."""
    self.body.append(convert(node.astext(), display="inline"))
    raise SkipNode


def write_displayed_math(self: Any, node: Any) -> None:
    """Write a formula on a line of its own."""
    self.body.append(f"<p>{convert(node.astext(), display='block')}</p>")
    raise SkipNode


def mark_parameter_lists(
    app: Any, page_name: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give the parameters of a long signature no list role: Sphinx writes them as a list without terms."""
    if "body" in context:
        context["body"] = context["body"].replace("<dl>\n<dd>", '<dl role="presentation">\n<dd>')


def setup(app: Any) -> None:
    """Register the formulas' renderer, and write the generated pages before Sphinx looks for pages."""
    app.connect("html-page-context", mark_parameter_lists)
    app.add_html_math_renderer("mathml", (write_inline_math, None), (write_displayed_math, None))
    app.connect("builder-inited", lambda app: generated_pages.write_pages(Path(app.srcdir) / "generated"))
    app.connect("source-read", link_project_pages)
