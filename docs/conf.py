"""Configuration of the documentation; `make docs` builds it and treats warnings as errors."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

project = "hf_pretrain"
extensions = ["myst_parser", "sphinxcontrib.mermaid", "recipe_flags"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "hf_pretrain"

# Links such as data.md#packing need an anchor for each heading. `dollarmath` stays off: it would read shell variables.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# GitHub draws a ```mermaid block by itself; here it becomes the directive of the same name.
myst_fence_as_directive = ["mermaid"]
# Flags begin with two hyphens; typographic quotes would make a dash of them.
smartquotes = False
nitpicky = True
