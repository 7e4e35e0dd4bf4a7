"""A window and a series under one denominator: its state, at any split of the sequence."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Case, Shape, assert_close, make_case
from softmax_rnn.ops import formula

NAMES = [name for name, spec in WIDENED.items() if spec.outside == "series"]
FORTY = Shape(queries=40, keys=40)
# Each mask whole and in parts; token by token where the most is hidden.
SPLITS = [
    ("none", (17, 1, 0, 22)),
    ("padding", (40,)),
    ("padding", (3, 30, 7)),
    ("gaps", (1,) * 40),
    ("gaps", (17, 1, 0, 22)),
    ("gaps", (3, 30, 7)),
]


PER_TOKEN = ("q", "k", "v", "log_decay", "outside_q", "outside_k")
EVERY = [(name, width) for name in NAMES for width in (None, 5)]
every_series = pytest.mark.parametrize(("name", "width"), EVERY)


def drawn(
    name: str,
    mask: str = "none",
    width: int | None = None,
    shape: Shape = FORTY,
) -> Case:
    """A case; ``width`` is that of other queries and keys outside the window."""
    shape = dataclasses.replace(shape, outside_width=width)
    return make_case(WIDENED[name], mask=mask, shape=shape)


def pieces(case: Case, start: int, stop: int) -> dict[str, Any]:
    """The inputs of some positions."""
    found: dict[str, Tensor] = {}
    for key, x in case.tensors.items():
        per_token = key in PER_TOKEN and x.ndim > 1
        found[key] = x[:, :, start:stop] if per_token else x
    if case.mask is not None:
        found["mask"] = case.mask[..., start:stop]
    return found


def by_states(
    case: Case, split: Sequence[int], dtype: torch.dtype = torch.float64, **options: Any
) -> dict[str, Tensor]:
    """The outputs by states, and every gradient."""
    inputs = {key: x.to(dtype).requires_grad_() for key, x in case.tensors.items()}
    tracked = dataclasses.replace(case, tensors=inputs)
    outs, state = [], None
    ends = [0, *itertools.accumulate(split)]
    for start, stop in itertools.pairwise(ends):
        out, state = sr.attention(
            spec=case.spec,
            state=state,
            return_state=True,
            **pieces(tracked, start, stop),
            **options,
        )
        outs.append(out)
    out = torch.cat(outs, dim=2)
    grads = torch.autograd.grad(
        out, list(inputs.values()), case.upstream.to(dtype), materialize_grads=True
    )
    return {"out": out.detach(), **dict(zip(inputs, grads, strict=True))}


@pytest.mark.parametrize(("mask", "split"), SPLITS, ids=str)
@every_series
def test_a_state_at_any_split(
    name: str, width: int | None, mask: str, split: tuple[int, ...]
) -> None:
    case = drawn(name, mask, width)
    expected = case.run(sr.attention, form="dense")
    assert_close(by_states(case, split), expected, 1e-10)


@pytest.mark.parametrize("mask", ["none", "gaps", "full"])
@every_series
def test_the_formula_in_every_form(name: str, width: int | None, mask: str) -> None:
    """Sequences that are shorter than the window and its first keys, and longer ones."""
    for queries, keys in ((4, 4), (17, 19)):
        case = drawn(name, mask, width, Shape(1, 2, 1, queries, keys, width=3, value_width=2))
        expected = case.run(formula.attention)
        for form in case.forms:
            assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)
        if mask != "full" and queries == keys:
            for split in ((queries,), (1,) * queries):
                assert_close(by_states(case, split), expected, 1e-10, str(split))


@every_series
def test_keys_before_the_queries_of_a_piece(name: str, width: int | None) -> None:
    """The first tokens of a piece may be keys alone: then the queries are its last ones."""
    case = drawn(name, width=width)
    expected = sr.attention(spec=case.spec, **pieces(case, 0, 40), form="dense")
    _, state = sr.attention(spec=case.spec, return_state=True, **pieces(case, 0, 15))
    given = pieces(case, 15, 40)
    given |= {key: given[key][:, :, -3:] for key in ("q", "outside_q") if key in given}
    out, state = sr.attention(spec=case.spec, state=state, return_state=True, **given)
    assert state.tokens == 40
    torch.testing.assert_close(out, expected[:, :, -3:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1e-8, 1.0, 30.0, 1e4])
@every_series
def test_states_at_any_size(name: str, width: int | None, size: float) -> None:
    """In float32 and bfloat16, with rows that see no key: finite, gradients as well."""
    if not WIDENED[name].bounded and size > 1:
        pytest.skip("exp overflows")
    case = drawn(name, "padding", width)
    for key in ("q", "k", "outside_q", "outside_k"):
        if key in case.tensors:
            case.tensors[key].mul_(size)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        case = dataclasses.replace(
            case, tensors={key: x.to(dtype).double() for key, x in case.tensors.items()}
        )
        expected = case.run(sr.attention, form="dense")["out"]
        for split in ((40,), (3, 30, 7)):
            for found in (case.run(sr.attention, dtype), by_states(case, split, dtype)):
                assert all(x.isfinite().all() for x in found.values())
                error = (found["out"].double() - expected).norm() / expected.norm()
                assert error <= tolerance or size > 1  # scores of 1e4 have few digits


@every_series
def test_a_state_keeps_its_size(name: str, width: int | None) -> None:
    case = drawn(name, width=width)
    sizes = set()
    state = None
    for start in range(0, 40, 4):
        _, state = sr.attention(
            spec=case.spec, state=state, return_state=True, **pieces(case, start, start + 4)
        )
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert state is not None
    assert state.tokens == 40


@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("denominator", ["sum", "none"])
def test_small_weights_in_the_window_of_the_first_rows(denominator: Any, decay: Any) -> None:
    """Where no key is outside, or all have faded, exp(-300) is a weight as any other."""
    spec = sr.AttentionSpec(
        **{"series": "taylor", "order": 2, "window": 4, "outside": "series"},
        **{"denominator": denominator, "norm": "l2", "decay": decay},
    )
    case = make_case(spec, shape=Shape(queries=9, keys=9), decay=1e-3)
    for name, sign in (("q", 1.0), ("k", -1.0)):
        case.tensors[name].fill_(sign * (300 * 8**-0.5) ** 0.5)
    if decay == "token":
        case.tensors["log_decay"][:, :, 4] = -1e4  # all earlier keys have faded
    expected = case.run(sr.attention, form="dense")
    seen = slice(8) if decay == "token" else slice(4)
    assert expected["out"][:, :, seen].norm(dim=-1).min() > 0.99
    for form in case.forms:
        found = case.run(sr.attention, torch.float32, form=form)
        torch.testing.assert_close(
            found["out"].double(), expected["out"], atol=1e-4, rtol=1e-4, msg=form
        )
        assert all(x.isfinite().all() for x in found.values())


def test_small_weights_outside_a_masked_window() -> None:
    """A power of scores of 1e-16, where the keys inside are hidden: a quotient as any other."""
    spec = sr.AttentionSpec(series="power", order=4, window=5, outside="series")
    case = make_case(spec, shape=Shape(queries=20, keys=20), spread=1e-8)
    shown = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    shown[..., 10:] = False
    case = dataclasses.replace(case, mask=shown)
    expected = case.run(formula.attention)["out"]
    assert expected[:, :, 15:].norm(dim=-1).min() > 0.01
    for form in case.forms:
        found = case.run(sr.attention, torch.float32, form=form)
        torch.testing.assert_close(found["out"].double(), expected, atol=1e-4, rtol=1e-4, msg=form)
        assert all(x.isfinite().all() for x in found.values())


@pytest.mark.slow
def test_compiled() -> None:
    """Without breaks of the graph."""
    case = drawn("window_taylor_first", width=5)
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    assert_close(case.run(compiled), case.run(sr.attention), 1e-12)


def outside_of(spec: sr.AttentionSpec | str, **change: Any) -> None:
    """Call the attention with queries and keys outside the window, some of them changed."""
    x = torch.zeros(2, 2, 8, 4)
    given = {"outside_q": x.clone(), "outside_k": x.clone(), **change}
    sr.attention(x, x, x, spec, **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": "softmax"}, "outside_q was given, but this spec does not use one"),
        ({"outside_q": 3}, r"outside_q must be a torch.Tensor, not int"),
        ({"outside_k": torch.zeros(2, 2, 7, 4)}, r"outside_k must have shape \[2, 2, 8, 4\]"),
        ({"outside_k": torch.zeros(2, 2, 8, 0)}, r"outside_k must have shape \[2, 2, 8, 4\]"),
        ({"outside_k": torch.zeros(2, 2, 8)}, r"outside_k must have shape \[2, 2, 8, 4\]"),
        ({"outside_k": torch.zeros(2, 2, 8, 5)}, "outside_q has width 4, outside_k has 5"),
        ({"outside_k": torch.zeros(2, 2, 8, 4).double()}, "outside_k must be torch.float32"),
        (
            {
                **{name: torch.zeros(2, 2, 8, 5) for name in ("outside_q", "outside_k")},
                "spec": dataclasses.replace(WIDENED["window_taylor"], decay="channel"),
            },
            "outside_q and outside_k have width 5, q and k have 4: with decay='channel'",
        ),
        (
            {"mask": torch.ones(8, 8, dtype=torch.bool), "return_state": True},
            "With a state every query and head sees the same keys",
        ),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outside_of(**{"spec": WIDENED["window_taylor"], **change})


def test_one_of_both_may_be_given() -> None:
    case = drawn("window_taylor_first", width=8)
    del case.tensors["outside_q"]
    expected = case.run(formula.attention)
    assert_close(case.run(sr.attention), expected, 1e-10)
    assert_close(by_states(case, (17, 23)), expected, 1e-10)


def test_a_state_of_other_keys_is_refused() -> None:
    case = drawn("window_taylor_first", width=8)  # as wide as those inside
    _, state = sr.attention(spec=case.spec, return_state=True, **pieces(case, 0, 20))
    given = {key: x for key, x in pieces(case, 20, 40).items() if "outside_k" not in key}
    with pytest.raises(ValueError, match=r"the widths of k and outside_k, \[8, None\], not"):
        sr.attention(spec=case.spec, state=state, **given)
    cut = dataclasses.replace(state, first=None)
    with pytest.raises(ValueError, match="must hold 3 first keys, not 0"):
        sr.attention(spec=case.spec, state=cut, **pieces(case, 20, 40))
    again = sr.State.from_tensors(case.spec, state.tokens, state.tensors)
    assert again.tensors.keys() == state.tensors.keys()
    assert again.nbytes == state.nbytes


def test_a_state_of_another_window_is_refused() -> None:
    case = drawn("window_taylor")
    _, state = sr.attention(spec=case.spec, return_state=True, **pieces(case, 0, 20))
    cut = dataclasses.replace(state, recent=None)
    with pytest.raises(ValueError, match="must hold 6 recent keys, not 0"):
        sr.attention(spec=case.spec, state=cut, **pieces(case, 20, 40))


@pytest.mark.parametrize(
    "fields",
    [
        {"denominator": "length"},
        {"global_keys": 3, "denominator": "length"},
        {"decay": "token"},
        {"series": "taylor", "order": 2, "outside": "series", "decay": "token"},
    ],
    ids=str,
)
def test_memory_follows_the_keys_and_not_the_window(fields: dict[str, Any]) -> None:
    wide, all_keys = (sr.AttentionSpec(window=window, **fields) for window in (2**40, 40))
    case = make_case(wide, shape=FORTY, mask="padding")
    expected = dataclasses.replace(case, spec=all_keys).run(sr.attention, form="dense")
    for form in case.forms:
        assert_close(case.run(sr.attention, form=form), expected, 1e-10, form)
    if wide.outside == "series":  # a state keeps room for the whole window
        with pytest.raises(MemoryError, match="window=1099511627776 and global_keys=0 take"):
            sr.attention(spec=wide, return_state=True, **case.tensors)
