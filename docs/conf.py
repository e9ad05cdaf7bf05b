"""Settings of the documentation: sphinx-build -n -W docs docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # these pages are about the daskps beside them

import daskps

project = "daskps"
author = "the daskps developers"
copyright = "2026, the daskps developers"
release = version = daskps.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "figures"]
html_theme = "furo"
html_title = f"daskps {version}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what a parameter may be
napoleon_google_docstring = False
napoleon_use_rtype = False

# Every name of our own that a page refers to must exist. Other projects' names stay plain text:
# to look them up, the build would need a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!daskps(\.|$)).*")]


def public_names_are_documented(app, env):
    """Fail a build with -W when a name in `daskps.__all__` has no entry in the API page."""
    from sphinx.util import logging

    logger = logging.getLogger(__name__)
    documented = env.domaindata["py"]["objects"]
    for name in daskps.__all__:
        if not name.startswith("__") and f"daskps.{name}" not in documented:
            logger.warning("daskps.%s is public, but not in docs/api.rst", name)


def setup(app):
    app.connect("env-check-consistency", public_names_are_documented)
