"""Conversions measured head by head, and their initial values, against dense weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import softmax_rnn as sr
from softmax_rnn.conversion.heads import (
    converted_heads,
    has_both,
    state_off,
    window_off,
)
from softmax_rnn.conversion.initial_values import fit_initial_values
from softmax_rnn.conversion.layer import (
    Attending,
    as_source,
    converted_layers,
    substituted,
)
from softmax_rnn.conversion.measures import decoding_costs
from sources import SIZES

TOKENS, WINDOW = 40, 6


def model(attention: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    found = sr.convert(LlamaForCausalLM(LlamaConfig(**SIZES)), attention, **options).eval()
    with torch.no_grad():
        for layer in converted_layers(found):
            for x in layer.parameters():
                x.add_(0.3 * torch.randn_like(x))
    return found


def rows(count: int = 2) -> list[Tensor]:
    drawn = torch.randint(0, 257, (count, TOKENS), generator=torch.Generator().manual_seed(2))
    return list(drawn)


def attending(found: Any, ids: Tensor) -> list[Attending]:
    """What every layer is asked, on the source's inputs."""
    seen: list[Attending] = []

    def note(what: Attending) -> Tensor:
        seen.append(what)
        return what.source()

    with torch.no_grad(), substituted(found, note):
        found.base_model(input_ids=ids[None], use_cache=False)
    return seen


def weights(what: Attending) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of a ``window_state`` head inside and outside, and softmax's, [H, T, T]."""
    own, q = what.layer.feature_map, what.query[0].double()
    k = what.key[0].double().repeat_interleave(2, 0)
    cos, sin = what.inputs.position_embeddings
    back = apply_rotary_pos_emb(q[None], k[None], cos, -sin)
    plain_q, plain_k = (x[0] / (cos.square() + sin.square()) for x in back)
    k_matrix, k_shift = (x.double().repeat_interleave(2, 0) for x in (own.k_matrix, own.k_shift))
    width = q.shape[-1]
    features = (
        (width**-0.25 * plain_q @ own.q_matrix.double().mT + own.q_shift.double()[:, None]).relu()
        ** 2,
        (width**-0.25 * plain_k @ k_matrix.mT + k_shift[:, None]).relu() ** 2,
    )
    factor = what.layer.outside_logit.double().exp()[:, None, None] / math.sqrt(2 * width)
    scores = (q @ k.mT / math.sqrt(width)).exp()
    near = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1 - WINDOW)
    near[:, 0] = True
    inside = torch.where(near, scores, 0.0).tril()
    outside = torch.where(near, 0.0, factor * features[0] @ features[1].mT).tril()
    return inside, outside, scores.tril()


def output(weight: Tensor, what: Attending) -> Tensor:
    v = what.value[0].double().repeat_interleave(2, 0)
    return weight / weight.sum(-1, keepdim=True) @ v


def error(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).square().sum((1, 2)) / expected.square().sum((1, 2))


def test_errors_and_shares_are_those_of_dense_weights() -> None:
    found = model(f"window_state:{WINDOW}")
    heads = converted_heads(found, rows())
    expected = []
    for layer in range(2):
        sums: dict[str, list[Tensor]] = {}
        for ids in rows():
            what = attending(found, ids)[layer]
            inside, outside, exact = weights(what)
            target = output(exact, what)
            share = (outside.sum(-1) / (inside + outside).sum(-1))[:, WINDOW + 1 :].mean(-1)
            for name, value in (
                ("error", error(output(inside + outside, what), target)),
                ("error_state_off", error(output(inside, what), target)),
                ("state_share", share),
            ):
                sums.setdefault(name, []).append(value)
        expected.append({name: torch.stack(x).mean(0) for name, x in sums.items()})
    assert heads["layer"].tolist() == [0] * 4 + [1] * 4
    for name in ("error", "error_state_off", "state_share"):
        both = torch.cat([part[name] for part in expected])
        np.testing.assert_allclose(heads[name], both.detach(), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("size", [1, 30])
def test_the_state_alone(size: float) -> None:
    found = model(f"window_state:{WINDOW}").double()
    with torch.no_grad():  # scores of several hundred
        for layer in found.model.layers:
            layer.self_attn.q_proj.weight.mul_(size)
    for what in attending(found, rows()[0]):
        _, outside, _ = weights(what)
        alone = window_off(what)[0].transpose(0, 1)[:, WINDOW + 1 :]
        wanted = output(outside, what)[:, WINDOW + 1 :]
        torch.testing.assert_close(alone, wanted)
        assert torch.equal(window_off(what)[:, :WINDOW], state_off(what)[:, :WINDOW])


@pytest.mark.parametrize("attention", ["taylor:2", "norm", "window:8"])
def test_attention_without_a_window_and_a_state(attention: str) -> None:
    found = model(attention)
    heads = converted_heads(found, rows())
    assert not has_both(found)
    assert list(heads) == ["layer", "head", "error"]
    what = attending(found, rows()[0])[0]
    assert torch.equal(state_off(what), what.converted())


def test_nested_substitutes() -> None:
    found, ids = model(f"window_state:{WINDOW}"), rows()[0][None]
    with torch.no_grad(), substituted(found, as_source):
        expected = found(ids).logits
        with substituted(found, state_off):
            assert not torch.allclose(found(ids).logits, expected)
        assert torch.equal(found(ids).logits, expected)


def test_softmax_with_another_part_is_converted() -> None:
    found = model("softmax", layer_options={"skip": True})
    assert len(converted_layers(found)) == 2
    torch.manual_seed(0)
    plain, ids = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), rows()[0][None]
    with torch.no_grad(), substituted(found, as_source):
        torch.testing.assert_close(found(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_mask_of_pairs_cannot_have_first_keys() -> None:
    """Unless it shows packed sequences, each with its own first keys."""
    found, ids = model(f"window_state:{WINDOW}"), torch.randint(0, 257, (1, 20))
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril().triu(-15)
    with pytest.raises(ValueError, match="needs a mask of keys"):
        found(ids, attention_mask=mask, use_cache=False)


def test_a_share_is_missing_after_a_norm() -> None:
    spec = {**sr.variant("window_taylor:2").to_dict(), "window": 5, "norm": "l2"}
    heads = converted_heads(model(spec), rows())
    assert heads.state_share.isna().all()
    assert (heads.error_state_off > 0).all()


def test_the_factor_of_the_state_is_the_best_of_all() -> None:
    found = model(f"window_state:{WINDOW}")
    with torch.no_grad():
        for layer in converted_layers(found):
            layer.feature_map.q_matrix.mul_(torch.tensor([0.1, 0.5, 2.0, 10.0])[:, None, None])
    errors = []
    for logit in range(-12, 7):
        with torch.no_grad():
            for layer in converted_layers(found):
                layer.outside_logit.fill_(logit)
        errors.append(converted_heads(found, rows()).error)
    fit_initial_values(found, rows())
    best = np.argmin(errors, axis=0) - 12
    chosen = torch.cat([layer.outside_logit for layer in converted_layers(found)])
    assert chosen.tolist() == best.tolist()
    assert len(set(best)) > 1
    np.testing.assert_allclose(converted_heads(found, rows()).error, np.min(errors, axis=0))


def test_a_fit_needs_finite_outputs_and_keys_outside_the_window() -> None:
    found = model(f"window_state:{TOKENS}")
    fit_initial_values(found, rows())
    assert all((layer.outside_logit == 0).all() for layer in converted_layers(found))
    with torch.no_grad():
        found.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"layers\.1\.self_attn is not finite"):
        fit_initial_values(found, rows())


def test_nothing_to_fit() -> None:
    found = model("taylor:2")
    before = {name: x.clone() for name, x in found.state_dict().items()}
    fit_initial_values(found, rows())
    assert all(torch.equal(x, before[name]) for name, x in found.state_dict().items())


def test_the_cache_of_a_state_does_not_grow() -> None:
    found = model(f"window_state:{WINDOW}")
    ids = torch.cat(rows(3))
    plain = LlamaForCausalLM(LlamaConfig(**SIZES))
    costs = decoding_costs({"plain": plain, "state": found}, ids, [16, 64, 100])
    assert (costs.tokens_per_second > 0).all()
    sizes = {name: x.cache_bytes for name, x in costs.groupby("stage")}
    assert sizes["state"].nunique() == 1
    assert sizes["plain"].tolist() == [2 * 2 * 2 * 8 * 4 * tokens for tokens in (16, 64, 100)]


def test_models_decode_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes ten times as slow meanwhile leaves equal models equal."""
    models = {name: LlamaForCausalLM(LlamaConfig(**SIZES)) for name in ("one", "other")}
    now, calls = [0.0], []

    def passes(*_: object) -> None:
        calls.append(1)
        now[0] += 1.0 if len(calls) < 12 else 10.0

    for model in models.values():
        model.register_forward_hook(passes)
    monkeypatch.setattr("softmax_rnn.conversion.measures.time.perf_counter", lambda: now[0])
    costs = decoding_costs(models, torch.cat(rows(3)), [16, 32])
    assert costs.tokens_per_second[0] == costs.tokens_per_second[1] == 1.0
    assert costs.tokens_per_second[2] == costs.tokens_per_second[3] == 0.1


def test_generation_of_many_tokens_keeps_its_memory_and_its_logits() -> None:
    found = model(f"window_state:{WINDOW}")
    ids = torch.cat(rows(10))[None]
    cache, sizes, logits = found.new_cache(), [], []
    with torch.no_grad():
        for start in range(0, 400, 5):
            out = found(ids[:, start : start + 5], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
            sizes.append(cache.nbytes)
        whole = found(ids, use_cache=False).logits
    assert len(set(sizes)) == 1
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-3, atol=1e-3)
