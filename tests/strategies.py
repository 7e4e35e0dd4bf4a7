"""What property tests draw: specifications, widths, layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

from cases import LAYOUTS
from softmax_rnn.ops.spec import AttentionSpec


def layouts() -> st.SearchStrategy[dict[str, str]]:
    """A layout for each of q, k, v and the gradient of the output."""
    return st.fixed_dictionaries(
        {name: st.sampled_from(list(LAYOUTS)) for name in ("q", "k", "v", "upstream")}
    )


def widths() -> st.SearchStrategy[tuple[int, int]]:
    """Widths of keys and values."""
    return st.tuples(st.sampled_from([8, 5, 1]), st.sampled_from([6, 8, 1]))


def coefficients() -> st.SearchStrategy[tuple[float, ...]]:
    """Coefficients of a polynomial, the last one not 0."""
    lower = st.lists(st.floats(-1.0, 1.0).map(lambda a: a if abs(a) > 1e-30 else 0.0), max_size=5)
    return st.tuples(lower, st.floats(0.1, 1.0)).map(lambda parts: (*parts[0], parts[1]))


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Any spec at all whose output does not blow up at a zero of the row sum."""
    series = draw(st.sampled_from(["exp", "taylor", "power", "polynomial"]))
    fixed = series == "polynomial" and draw(st.booleans())
    window = draw(st.none() | st.integers(1, 20))
    both = window is not None and series != "exp" and draw(st.booleans())
    denominator = draw(
        st.sampled_from(
            [
                "sum",
                "detached_sum",
                "clamped_sum",
                "sum_plus_one",
                "sum_plus_sink",
                "length",
                "learned_length",
                "none",
            ]
        )
    )
    spec = AttentionSpec(
        feature_map=draw(st.sampled_from(["identity", "elu1", "relu", "cosine"])),
        series=series,
        order=None if series == "exp" or fixed else draw(st.integers(0, 6)),
        coefficients=draw(coefficients()) if fixed else None,
        clamp=None if both else draw(st.none() | st.floats(0.1, 3.0)),
        scale=draw(st.none() | st.floats(0.1, 1.0) | st.floats(-1.0, -0.1)),
        denominator=denominator,
        input_gate=draw(st.booleans()),
        output_gate=draw(st.sampled_from(["none", "before_norm", "after_norm"])),
        norm=draw(st.sampled_from(["none", "l2", "rms", "layer"])),
        epsilon=draw(st.sampled_from([0.0, 0.1]))
        if denominator in ("sum", "detached_sum")
        else 0.0,
        decay=draw(st.sampled_from(["none", "none", "head", "token", "channel"])),
        window=window,
        global_keys=0 if window is None else draw(st.sampled_from([0, 0, 1, 5])),
        outside="series" if both else "hidden",
    )
    safe = spec.sign_definite or denominator in ("clamped_sum", "length", "learned_length", "none")
    return spec if safe else dataclasses.replace(spec, floor=0.5, denominator="sum")


def comparable(compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of a case; it is rejected if nothing can be compared with them."""
    try:
        expected = compute()
    except OverflowError:  # of an exponential without a denominator
        reject()
    largest = float(torch.stack([x.detach().abs().max() for x in expected.values()]).max())
    if not 1e-12 < largest < 1e100:  # all cancels, squares overflow, or 0 / 0 (NaN)
        reject()
    return expected
