"""Sphinx: pages in Markdown, built with every warning an error; references are read from the code at build time."""

import sys
from pathlib import Path

import corerl

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "CoreRL"
author = "The CoreRL authors"
copyright = "The CoreRL authors"  # noqa: A001  -- Sphinx's word
release = version = corerl.__version__

extensions = ["myst_parser", "reference"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = f"CoreRL {release}"
