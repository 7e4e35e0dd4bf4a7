"""One colour and line style a variant, the same in every figure."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

# Okabe and Ito's colours, told apart by colour-blind readers.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILION, _PURPLE = "#0072B2", "#D55E00", "#CC79A7"
_PALETTE = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY)
_DASHES = ("-", "--", "-.", ":")


# What every figure shares: text that can be searched, and SVG that is the same each time.
LOOK: dict[Any, Any] = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "softmax-rnn"}


class Style(NamedTuple):
    """A line: its colour, and its dashes in matplotlib's and plotly's words."""

    color: str
    dashes: str

    @property
    def plotly_dash(self) -> str:
        """The dashes as plotly calls them."""
        return {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}[self.dashes]


_FIXED = {
    "softmax": Style(_BLACK, "-"),
    "norm": Style(_BLUE, "--"),
    "gate": Style(_VERMILION, "-"),
    "linear_elu": Style(_GREEN, "-."),
    "linear_relu": Style(_ORANGE, "-."),
    "linear_cosine": Style(_PURPLE, "-."),
}


def style(variant: str) -> Style:
    """The style of a variant, by its name alone."""
    if variant in _FIXED:
        return _FIXED[variant]
    draw = hashlib.sha256(variant.encode()).digest()
    return Style(_PALETTE[draw[0] % len(_PALETTE)], _DASHES[draw[1] % len(_DASHES)])
