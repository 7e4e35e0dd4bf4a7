"""Token by token without gradients: the sums and the state of the chunked form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import softmax_rnn as sr
from cases import WIDENED, Shape, make_case
from softmax_rnn.ops import attention as operation
from softmax_rnn.ops.forms.chunks import chunked as module

SPECS = {
    **{name: spec for name, spec in WIDENED.items() if "chunked" in sr.forms(spec)},
    **{name: sr.variant(name) for name in ("linear_elu", "taylor:2", "taylor:5", "norm_relu")},
}
SPECS = {name: spec for name, spec in SPECS.items() if "chunked" in sr.forms(spec)}
LENGTH = 12


def at(x: Tensor, token: int) -> Tensor:
    """A token of what has one value for each."""
    return x[:, :, token : token + 1] if x.ndim > 2 else x


@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("name", SPECS)
def test_every_token_of_every_finite_series(
    name: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, calls, original = SPECS[name], [], module.one_token

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "one_token", counted)
    monkeypatch.setattr(operation, "_SHORT", {})  # which have tests of their own
    case = make_case(spec, shape=Shape(2, 4, 2, LENGTH, LENGTH, 5, 6), mask=mask, decay=0.3)
    expected = sr.attention(spec=spec, mask=case.mask, form="dense", **case.tensors)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-4)):
        tensors = {key: x.to(dtype) for key, x in case.tensors.items()}
        _, whole = sr.attention(spec=spec, mask=case.mask, return_state=True, **tensors)
        state, outputs = None, []
        with torch.no_grad():
            for token in range(LENGTH):
                shown = None if case.mask is None else case.mask[..., token : token + 1]
                given = {key: at(x, token) for key, x in tensors.items()}
                out, state = sr.attention(
                    spec=spec, mask=shown, state=state, return_state=True, **given
                )
                outputs.append(out)
        found = torch.cat(outputs, 2).double()
        assert float((found - expected).norm() / expected.norm()) < tolerance
        assert state is not None
        torch.testing.assert_close(state.tensors, whole.tensors, rtol=tolerance, atol=tolerance)
    assert len(calls) == 2 * (LENGTH - 1)  # the first token has no state before it


def test_a_sum_below_its_rounding_error_is_noise() -> None:
    """As in chunks: terms that cancel to nearly 0 divide nothing."""
    spec, size = sr.variant("taylor:4"), 30.0
    k = size * torch.ones(1, 1, 8, 3)
    v, q = torch.randn(1, 1, 8, 2), -k[:, :, :1]
    _, state = sr.attention(k[:, :, :7], k[:, :, :7], v[:, :, :7], spec, return_state=True)
    with torch.no_grad():
        found, _ = sr.attention(q, k[:, :, 7:], v[:, :, 7:], spec, state=state, return_state=True)
    q.requires_grad_()
    expected, _ = sr.attention(q, k[:, :, 7:], v[:, :, 7:], spec, state=state, return_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_gradients_take_the_other_way() -> None:
    case = make_case(SPECS["taylor:2"], shape=Shape(1, 2, 1, 1, 1))
    q, k, v = (case.tensors[name] for name in "qkv")
    _, state = sr.attention(q, k, v, "taylor:2", return_state=True)
    q.requires_grad_()
    out, _ = sr.attention(q, k, v, "taylor:2", state=state, return_state=True)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.isfinite().all()
