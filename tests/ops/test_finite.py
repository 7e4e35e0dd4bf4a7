"""Numbers beyond the range of their type: the same error from every form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import softmax_rnn as sr
from cases import Shape, make_case

# A sum of negative powers is at least 1: the numerator stays as large as it is.
LEAST = sr.AttentionSpec(series="power", order=9, denominator="clamped_sum")
FINITE = ["taylor:4", "power:4", "quadratic", "taylor_elu:4", "taylor_relu:3"]


@pytest.mark.parametrize("name", FINITE)
def test_sums_that_overflow_are_an_error_in_every_form(name: str) -> None:
    spec = sr.variant(name)
    case = make_case(spec, shape=Shape(queries=70, keys=70), spread=1e10)
    q, k, v = (case.tensors[x].float() for x in "qkv")
    for form in ("auto", *sr.forms(spec)):
        if spec.scale_free:  # the quotient of large powers is an ordinary number
            assert sr.attention(q, k, v, spec, form=form).isfinite().all(), form
            continue
        with pytest.raises(OverflowError, match="overflow"):
            sr.attention(q, k, v, spec, form=form)


@pytest.mark.parametrize("form", ["auto", *sr.forms("taylor:4")])
def test_the_error_gives_the_sizes(form: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 150, 8).unbind(0)
    message = r"power 4 overflow torch.float32: the longest query has norm .*e\+05, the longest key"
    with pytest.raises(OverflowError, match=message):
        sr.attention(q * 1e5, k * 1e5, v, "taylor:4", form=form)


@pytest.mark.parametrize("form", sr.forms("quadratic"))
def test_an_output_beyond_float16_is_an_error(form: str) -> None:
    q = torch.full((1, 1, 300, 4), 20.0, dtype=torch.float16)
    with pytest.raises(OverflowError, match=r"The largest output, .*, overflows torch.float16"):
        sr.attention(q, q, q, "quadratic", form=form)
    with pytest.raises(OverflowError, match="overflow"):
        sr.attention(*(x * 1e4 for x in (-q.float(), q.float(), q.float())), LEAST, form=form)
    assert sr.attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), "quadratic").isfinite().all()


@pytest.mark.parametrize("name", ["taylor:2", "quadratic"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", sr.forms("taylor:2"))
def test_inputs_that_are_not_finite_go_through(form: str, bad: float, name: str) -> None:
    """As in softmax: a training step sees a loss that is not finite, and may be skipped."""
    q, k, v = torch.randn(3, 1, 2, 20, 4).unbind(0)
    q[0, 0, 3] = bad
    out = sr.attention(q, k, v, name, form=form)
    assert not out[0, 0, 3].isfinite().any()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("size", [40, 300])
@pytest.mark.parametrize("name", ["softmax+decay", "taylor:2+decay", "norm+decay", "channel"])
def test_a_decay_that_is_nan_goes_through(name: str, size: int) -> None:
    """From its row on, in every form: a diverged gate must not look healthy."""
    q, k, v = torch.randn(3, 1, 2, size, 8).unbind(0)
    channel = sr.AttentionSpec(series="power", order=1, denominator="none", decay="channel")
    spec = channel if name == "channel" else sr.variant(name)
    decay = -0.1 * torch.rand(1, 2, size, *([8] if spec.decay == "channel" else []))
    decay[0, 1, size // 2] = torch.nan
    for form in ("auto", *sr.forms(spec)):
        wanted = q.clone().requires_grad_()
        out = sr.attention(wanted, k, v, spec, log_decay=decay, form=form)
        bad = out.isnan().any(-1)
        assert not bad[0, 0].any(), form
        assert bad[0, 1].tolist() == [t >= size // 2 for t in range(size)], form
        assert torch.autograd.grad(out.sum(), wanted)[0][0, 1].isnan().any(), form
    if spec.has_state:
        with pytest.raises(FloatingPointError, match=f"The log decay of token {size // 2} "):
            sr.attention(q, k, v, spec, log_decay=decay, return_state=True)


@pytest.mark.parametrize("form", sr.forms(sr.AttentionSpec(denominator="none")))
def test_an_exponential_that_overflows_with_its_values(form: str) -> None:
    x = torch.full((1, 1, 1, 1), 9.2)
    with pytest.raises(OverflowError, match=r"The largest output, inf.*value 1e\+04"):
        sr.attention(x, x, x * 0 + 1e4, sr.AttentionSpec(denominator="none"), form=form)


@pytest.mark.parametrize("form", sr.forms("linear_elu"))
def test_a_hidden_value_that_is_not_finite_is_no_overflow(form: str) -> None:
    x, v = torch.ones(1, 1, 2, 1), torch.tensor([1.0, torch.nan]).view(1, 1, 2, 1)
    sr.attention(x, x, v, "linear_elu", mask=torch.tensor([True, False]), form=form)


def test_a_state_of_powers_that_vanish_is_an_error() -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 4).unbind(0)
    with pytest.raises(FloatingPointError, match="Power 6 of keys of at most .* underflows"):
        sr.attention(q, k * 1e-8, v, "power:6", return_state=True)


@pytest.mark.parametrize("hidden_by", ["token", "channel", "window", "mask"])
def test_keys_beside_much_longer_hidden_ones(hidden_by: str) -> None:
    """Rows are scaled by the longest key so far, even if it has faded: others may underflow."""
    tokens, reset = 12, 6
    q, k, v = torch.randn(3, 1, 2, tokens, 8).unbind(0)
    k[:, :, :reset] *= 1e12
    spec = sr.AttentionSpec(series="power", order=6)
    decay, mask = None, None
    if hidden_by == "window":
        spec = replace(spec, window=3)
    elif hidden_by == "mask":
        mask = torch.ones(tokens, tokens, dtype=torch.bool)
        mask[reset:, :reset] = False
    else:
        spec = replace(spec, decay=hidden_by)
        decay = torch.zeros(1, 2, tokens, *[8] * (hidden_by == "channel"))
        decay[:, :, reset] = -1e4
    given = {"mask": mask, "log_decay": decay}
    with pytest.raises(FloatingPointError, match="Power 6 of the keys that query .* sees underfl"):
        sr.attention(q, k, v, spec, **given)
    if decay is not None:
        given["log_decay"] = decay.double()
    found = sr.attention(*(x.double() for x in (q, k, v)), spec, **given)
    later = (x[:, :, reset:].double() for x in (q, k, v))
    alone = sr.attention(*later, replace(spec, decay="none"))
    torch.testing.assert_close(found[:, :, reset + 2 :], alone[:, :, 2:])


@pytest.mark.parametrize("hidden", [1.0, torch.nan, torch.inf])
def test_hidden_keys_do_not_hide_an_overflow_of_outputs(hidden: float) -> None:
    q = torch.ones(1, 1, 4, 2).half()
    k, v = q.clone(), torch.full_like(q, 6e4)
    k[:, :, 0] = hidden
    mask = torch.tensor([False, True, True, True])
    with pytest.raises(OverflowError, match=r"The largest output, 7.*e\+05, overflows"):
        sr.attention(q, k, v, sr.AttentionSpec(denominator="none"), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_coefficients_that_underflow_are_refused(dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 2, 2), 5.0, dtype=dtype)
    highest = 170 if dtype == torch.float64 else 33
    spec = sr.AttentionSpec(series="taylor", order=highest)
    for form in sr.forms(spec):  # chunked and recurrent included
        sr.attention(x, x, x, spec, form=form)
    with pytest.raises(ValueError, match=f"order={highest + 1} .* Use an order up to {highest}"):
        sr.attention(x, x, x, replace(spec, order=highest + 1))
    least = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny / 4
    polynomial = sr.AttentionSpec(series="polynomial", coefficients=(1.0, 0.0, least))
    with pytest.raises(ValueError, match="of the polynomial underflows"):
        sr.attention(x, x, x, polynomial)


@pytest.mark.parametrize("form", sr.forms("taylor:4"))
def test_hidden_keys_do_not_hide_an_overflow(form: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 4).unbind(0)
    k[:, :, :2] = torch.nan
    with pytest.raises(OverflowError, match="overflow"):
        sr.attention(q * 1e5, k * 1e5, v, "taylor:4", mask=torch.arange(20) >= 2, form=form)


@pytest.mark.parametrize("name", ["output_gate", "norm_weight", "norm_bias"])
def test_a_bounded_output_that_is_enlarged_beyond_float16(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).half().unbind(0)
    shape, size = ((1, 2, 40), 1e6) if name == "output_gate" else ((8,), 1e5)
    gate = "after_norm" if name == "output_gate" else "none"
    spec = sr.AttentionSpec(norm="none" if name == "output_gate" else "layer", output_gate=gate)
    for form in ("auto", *sr.forms(spec)):
        with pytest.raises(OverflowError, match="The largest output"):
            sr.attention(q, k, v, spec, form=form, **{name: torch.full(shape, size)})
        sr.attention(q, k, v, spec, form=form, **{name: torch.full(shape, 10.0)})


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1.0, 6e4])
@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
@pytest.mark.parametrize("denominator", ["none", "sum"])
def test_a_norm_of_float16_values_of_any_size(norm: str, denominator: str, size: float) -> None:
    """No form rounds sums of small values to float16, which has few digits for them."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 8, generator=draw).half().unbind(0)
    v = (v.float() * size / v.float().abs().max()).half()
    spec = sr.AttentionSpec(norm=norm, denominator=denominator, clamp=None)  # type: ignore[arg-type]
    weight = torch.randn(1, 2, 300, 8, generator=draw)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().detach().requires_grad_() for x in given]
    expected = sr.attention(*exact, spec, form="dense")
    grads = torch.autograd.grad((expected * weight).sum(), exact)
    for form in ("auto", *(form for form in sr.forms(spec) if form != "triton")):
        out = sr.attention(*given, spec, form=form)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < 1e-3, form
        for found, true in zip(
            torch.autograd.grad((out.float() * weight).sum(), given), grads, strict=True
        ):
            if 1e-2 < true.abs().max() < 3e4:  # else float16 has no place, or few digits for it
                error = (found.double() - true).norm() / true.norm()
                assert error < 2e-2, form
