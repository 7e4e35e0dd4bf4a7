"""Several sequences in a row: each is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import softmax_rnn as sr
from cases import (
    MASKS,
    VARIANTS,
    WIDENED,
    Shape,
    assert_close,
    make_case,
)
from segmented import ids_of, one_by_one
from softmax_rnn.ops.segments import Segments
from softmax_rnn.ops.spec import AttentionSpec
from strategies import comparable, specs, widths

TOKENS = 61
CUTS = [[3, 4, 30], [20, 55]]  # of two rows: one token, a few, more than a window
ROWS = Shape(queries=TOKENS, keys=TOKENS)


SPECS = {**{name: sr.variant(name) for name in VARIANTS}, **WIDENED}


@pytest.mark.parametrize("name", SPECS)
def test_each_is_what_it_is_alone(name: str) -> None:
    spec = SPECS[name]
    for causal in (True, False):
        for mask in MASKS:
            case = make_case(spec, causal=causal, mask=mask, shape=ROWS, backward=True)
            expected = case.run(one_by_one(CUTS))
            found = case.run(sr.attention, segments=ids_of(CUTS, TOKENS))
            assert_close(case.in_units(found), case.in_units(expected), 1e-10, f"{causal} {mask}")


@pytest.mark.parametrize("name", ["softmax", "taylor_token", "window_taylor_first"])
def test_every_form(name: str) -> None:
    case = make_case(SPECS[name], shape=ROWS)
    expected = case.run(one_by_one(CUTS))
    for form in case.forms:
        found = case.run(sr.attention, segments=ids_of(CUTS, TOKENS), form=form)
        assert_close(case.in_units(found), case.in_units(expected), 1e-9, form)


@given(
    spec=specs(),
    causal=st.booleans(),
    backward=st.booleans(),
    mask=st.sampled_from(MASKS),
    padding=st.booleans(),
    tokens=st.integers(1, 150),
    cuts=st.lists(st.lists(st.integers(1, 149), max_size=12), min_size=2, max_size=2),
    widths=widths(),
    seed=st.integers(0, 999),
)
def test_any_spec_and_any_segments(
    spec: AttentionSpec,
    causal: bool,
    backward: bool,
    mask: str,
    padding: bool,
    tokens: int,
    cuts: list[list[int]],
    widths: tuple[int, int],
    seed: int,
) -> None:
    shape = Shape(2, 2, 1, tokens, tokens, *widths)
    case = make_case(spec, causal=causal, mask=mask, shape=shape, seed=seed, backward=backward)
    rows = [sorted({cut for cut in row if cut < tokens}) for row in cuts]
    options = {"padding": True} if padding and mask in ("none", "padding") else {}

    def meant(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Without the outputs of padding, which mean nothing."""

        def attended(*args: Any, **given: Any) -> Tensor:
            out = attend(*args, **given)
            return out.masked_fill(~case.mask.mT, 0.0) if options and case.mask is not None else out

        return attended

    expected = comparable(lambda: case.in_units(case.run(meant(one_by_one(rows)), **options)))
    found = case.run(meant(sr.attention), segments=ids_of(rows, tokens), **options)
    assert_close(case.in_units(found), expected, 1e-8)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_of_another_segment_is_read(causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 2, TOKENS, 4, generator=torch.Generator().manual_seed(0))
    ids = ids_of(CUTS, TOKENS)
    expected = sr.attention(q, k, v, "softmax", causal=causal, segments=ids)
    others = [(4, 30), (20, 55)]  # a segment of each row
    for b, (first, last) in enumerate(others):
        for x in (q, k, v):
            x[b, :, first:last] = torch.nan
    found = sr.attention(q, k, v, "softmax", causal=causal, segments=ids)
    for b, (first, last) in enumerate(others):
        for part in (slice(0, first), slice(last, TOKENS)):
            assert torch.equal(found[b, :, part], expected[b, :, part])


def test_one_row_of_numbers_is_that_of_all_rows() -> None:
    case = make_case(sr.variant("norm"), shape=ROWS)
    ids = ids_of(CUTS[:1], TOKENS)
    expected = case.run(sr.attention, segments=ids.expand(2, -1))
    found = case.run(sr.attention, segments=ids.int())
    assert torch.equal(found["out"], expected["out"])


def test_numbers_that_change_in_place() -> None:
    case = make_case(sr.variant("softmax"), shape=ROWS)
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    whole = case.run(sr.attention, segments=ids)["out"]
    torch.testing.assert_close(whole, case.run(sr.attention)["out"])
    ids[:, 30:] = 1
    parted = case.run(sr.attention, segments=ids)["out"]
    torch.testing.assert_close(parted, case.run(one_by_one([[30], [30]]))["out"])


def test_batches_waste_little() -> None:
    """Segments of all lengths: the padding is at most a third of the longer ones' tokens."""
    lengths = [*range(1, 400, 7)]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    batches = Segments(ids, 1).batches
    computed = sum(batch.tokens.numel() for batch in batches)
    assert computed < 1.34 * ids.numel() + 32 * sum(n <= 32 for n in lengths)
    assert len(batches) < 12


def test_an_empty_row() -> None:
    x = torch.zeros(2, 1, 0, 4)
    assert sr.attention(x, x, x, "softmax", segments=torch.zeros(2, 0).long()).shape == x.shape


X = torch.randn(2, 1, 5, 4)


@pytest.mark.parametrize(
    ("segments", "options", "message"),
    [
        ([0, 0, 1, 1, 1], {}, "must be a torch.Tensor of integers, not list"),
        (torch.zeros(2, 5), {}, "must be integers, one for each token, not torch.float32"),
        (torch.zeros(2, 5).bool(), {}, "must be integers, one for each token, not torch.bool"),
        (torch.zeros(5).long(), {}, r"must be \[B or 1, S\] = \[2 or 1, 5\], not \[5\]"),
        (torch.zeros(3, 5).long(), {}, r"must be \[B or 1, S\] = \[2 or 1, 5\], not \[3, 5\]"),
        (torch.zeros(2, 5).long(), {"q": X[:, :, 1:]}, "not 4 queries and 5 keys"),
        (torch.zeros(2, 5).long(), {"return_state": True}, "segments have no state"),
    ],
)
def test_invalid_segments(segments: Any, options: dict[str, Any], message: str) -> None:
    given = {"q": X, "k": X, "v": X, **options}
    with pytest.raises(ValueError, match=message):
        sr.attention(**given, spec="taylor:2", segments=segments)


def test_invalid_inputs_are_told_as_ever() -> None:
    ids = torch.zeros(2, 5).long()
    with pytest.raises(ValueError, match=r"k must be \[batch, heads, length, width\]"):
        sr.attention(X, X[0], X, "softmax", segments=ids)
    with pytest.raises(ValueError, match="mask .* cannot be broadcast"):
        sr.attention(X, X, X, "softmax", mask=torch.ones(2, 1, 1, 4).bool(), segments=ids)


def test_a_short_segment_among_longer_ones_overflows_no_sooner() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    v[:, :, 5] = 1e38
    ids = torch.tensor([[0, 0, 0, 0, 0, 1]])
    found = sr.attention(q, k, v, "taylor:2", segments=ids)[:, :, 5:]
    alone = sr.attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], "taylor:2")
    torch.testing.assert_close(found, alone)


def test_inference_leaves_nothing_that_training_cannot_use() -> None:
    x, ids = torch.randn(1, 2, 6, 4), torch.tensor([[3, 3, 4, 4, 4, 4]])
    with torch.inference_mode():
        sr.attention(x, x, x, "softmax", segments=ids)
    q = x.clone().requires_grad_()
    sr.attention(q, x, x, "softmax", segments=ids).sum().backward()
    assert q.grad is not None
