"""Configuration of the documentation; `make docs` builds it and treats warnings as errors."""

import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

project = "hf_pretrain"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinxcontrib.mermaid", "recipe_flags"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "hf_pretrain"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
# The script that draws the diagram comes from a CDN. Without a network, the page shows the source of the diagram.
mermaid_fullscreen = False
mermaid_height = "auto"

# Links such as data.md#packing need an anchor for each heading. `dollarmath` stays off: it would read shell variables.
myst_heading_anchors = 3
# The flag reference is made of definition lists.
myst_enable_extensions = ["colon_fence", "deflist"]
# GitHub draws a ```mermaid block by itself; here it becomes the directive of the same name.
myst_fence_as_directive = ["mermaid"]
# Flags begin with two hyphens; typographic quotes would make a dash of them.
smartquotes = False
nitpicky = True
# The names of other libraries, and of what is not public, have no page to refer to.
nitpick_ignore_regex = [("py:.*", ".*")]
# The docstrings name the types, with shapes.
autodoc_typehints = "none"


def write_code_as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn the Markdown of a docstring into reStructuredText: `code`, [`Name`] and [`~module.Name`] into ``code``."""
    lines[:] = [re.sub(r"\[?`(?:~[\w.]+\.)?([^`]+)`\]?", r"``\1``", line) for line in lines]


def setup(app) -> None:
    # Before napoleon, which reads the sections "Args", "Returns" and "Raises".
    app.connect("autodoc-process-docstring", write_code_as_rst, priority=400)
