"""Sphinx: pages in Markdown, built with every warning an error."""

import corerl

project = "CoreRL"
author = "The CoreRL authors"
copyright = "The CoreRL authors"  # noqa: A001  -- Sphinx's word
release = version = corerl.__version__

extensions = ["myst_parser"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = f"CoreRL {release}"
