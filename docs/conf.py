"""The site of the documentation: ``make docs`` builds it into ``build/site``.

The pages are the Markdown files of this folder, which GitHub shows as well. The site loads nothing
from elsewhere: formulas are MathML, and the search has its index beside the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from docutils.utils.math import latex2mathml

import softmax_rnn

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]

project, version = "softmax-rnn", softmax_rnn.__version__
html_title = f"{project} {version}"
copyright = "the authors of softmax-rnn, Apache 2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
# Lines of the pages that a search finds would be fetched, which needs a server.
html_show_search_summary = False
# A page without a server or the network: it stands beside the others as it is.
html_extra_path = ["slider.html"]

nitpicky = True
# Other packages' documentation is on the network; private names have none.
nitpick_ignore_regex = [(r"py:.*", r"(?!softmax_rnn\.).*|.*\._.*")]

# Notebooks are shown with the outputs that they were committed with.
nb_execution_mode = "off"
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _mathml(as_block: bool) -> tuple[object, None]:
    """How a node of a formula is written; browsers show MathML without a script."""

    def visit(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
        writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=as_block))
        raise nodes.SkipNode

    return visit, None


def setup(app: Sphinx) -> None:
    """Register the writer of formulas."""
    app.add_html_math_renderer("mathml", _mathml(False), _mathml(True))
