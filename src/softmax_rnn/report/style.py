"""One colour and line style per variant, the same in every figure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILION, _PURPLE = "#0072B2", "#D55E00", "#CC79A7"
_PALETTE = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY)
_DASHES = ("-", "--", "-.", ":")
_BY_ORDER = dict(zip((0, 1, 2, 3, 4, 6, 10), ("#999999", *_PALETTE), strict=True))

# Settings of every figure. SVG files contain searchable text, and are the same each time.
LOOK: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "softmax-rnn",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Style(NamedTuple):
    """A line's colour, and its dashes as matplotlib names them."""

    color: str
    dashes: str

    @property
    def plotly_dash(self) -> str:
        """The dashes as plotly names them."""
        return {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}[self.dashes]


_FIXED = {
    "softmax": Style(_BLACK, "-"),
    "norm": Style(_BLUE, "--"),
    "gate": Style(_VERMILION, "-"),
    "linear_elu": Style(_GREEN, "-."),
    "linear_relu": Style(_ORANGE, "-."),
    "linear_cosine": Style(_PURPLE, "-."),
    # Series, drawn against the order.
    "taylor": Style(_BLUE, "-"),
    "taylor_elu": Style(_GREEN, "-"),
    "taylor_relu": Style(_ORANGE, "-"),
    "taylor_cosine": Style(_PURPLE, "-"),
}
_SERIES = ("taylor", "taylor_elu", "taylor_relu", "taylor_cosine")
_FREE = [
    look
    for dashes in _DASHES
    for color in _PALETTE
    if (look := Style(color, dashes)) not in _FIXED.values()
]
# The ablations of figure 6, all different.
_ABLATIONS = (
    *("detached", "clamped", "length", "detached_gate", "gate_only", "input_gate", "both_gates"),
    *("relu_gate", "norm_l2_clamped", "norm_l2_length", "norm_rms", "norm_rms_length"),
    *("norm_layer_length", "norm_relu"),
)
_STYLES = {**_FIXED, **dict(zip(_ABLATIONS, _FREE, strict=False))}


def style(variant: str) -> Style:
    """The style for a variant's name; in ``taylor_elu:4`` the order sets the colour."""
    series, _, order = variant.partition(":")
    if variant in _STYLES:
        return _STYLES[variant]
    base, plus, _ = variant.partition("+")
    if plus:  # a variant with a decay has the colour of the one without
        return Style(style(base).color, ":")
    if series in _SERIES and order.isdecimal():
        color = _BY_ORDER.get(int(order), _PALETTE[int(order) % len(_PALETTE)])
        return Style(color, _DASHES[_SERIES.index(series)])
    return _FREE[int(hashlib.sha256(variant.encode()).hexdigest(), 16) % len(_FREE)]


def styles(variants: Iterable[str]) -> dict[str, Style]:
    """The styles of variants in one figure; of two with the same style one gets a free style."""
    looks: dict[str, Style] = {}
    # Fixed styles first, then those that an order or a decay sets, then any.
    for name in sorted(variants, key=lambda name: (name not in _STYLES, name.isidentifier(), name)):
        look, taken = style(name), looks.values()
        free = (other for other in _FREE if other not in taken)
        looks[name] = next(free, look) if look in taken else look
    return looks
