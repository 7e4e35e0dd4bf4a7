"""The encoders: both sides seen, padding and packing exact, losses, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaModel,
)

import softmax_rnn as sr
from softmax_rnn.models import SoftmaxRNNModel, initialize
from softmax_rnn.models.modeling import checkpoint_activations

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_labels": 3,
    "is_causal": False,
}
NAMES = (
    *("softmax", "norm", "linear_elu", "linear_cosine", "taylor:2", "gate", "based:2"),
    *("taylor:2+decay", "window_taylor:2"),
)
HEADS = (sr.SoftmaxRNNForMaskedLM, sr.SoftmaxRNNForSequenceClassification)
AUTO = (AutoModelForMaskedLM, AutoModelForSequenceClassification)


def build(kind: Any, attention: object = "taylor:2", **fields: object) -> Any:
    """A tiny model in float64, with weights large enough to make attention matter."""
    model = kind(sr.SoftmaxRNNConfig(attention=attention, **{**TINY, **fields}))
    initialize(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.double().eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))


def test_softmax_is_llama_with_both_sides(ids: torch.Tensor) -> None:
    """transformers' own way to look both ways, with the same weights."""
    ours = build(SoftmaxRNNModel, "softmax")
    fields = {key: x for key, x in TINY.items() if key != "num_labels"}
    llama = LlamaModel(LlamaConfig(**fields, attn_implementation="sdpa")).double().eval()
    llama.load_state_dict(ours.state_dict())
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for options in ({}, {"attention_mask": mask}):
        found, expected = (
            model(ids, **options, use_cache=False)[0][mask.bool()] for model in (ours, llama)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # its norms: float32
    causal = build(SoftmaxRNNModel, "softmax", is_causal=True)
    assert (causal(ids, use_cache=False)[0] - ours(ids)[0]).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_every_token_sees_every_other(name: str, ids: torch.Tensor) -> None:
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    for causal in (False, True):
        model = build(SoftmaxRNNModel, name, is_causal=causal)
        both = [model(x, use_cache=False)[0][:, :-1] for x in (ids, changed)]
        moved = (both[0] - both[1]).abs().amax((0, 2))
        assert (moved == 0).all() if causal else (moved > 1e-6).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", HEADS)
def test_padding_changes_nothing(kind: Any, name: str, side: str, ids: torch.Tensor) -> None:
    model, shown = build(kind, name), slice(4, None) if side == "left" else slice(None, 9)
    mask = torch.zeros_like(ids)
    mask[0], mask[1, shown] = 1, 1
    found = model(ids, attention_mask=mask).logits
    alone = [model(ids[:1]).logits[0], model(ids[1:, shown]).logits[0]]
    unmasked = model(ids).logits[1]
    if kind is sr.SoftmaxRNNForMaskedLM:
        torch.testing.assert_close(found[1, shown], alone[1])
        unmasked = unmasked[shown]
    else:
        torch.testing.assert_close(found[1], alone[1])
    torch.testing.assert_close(found[0], alone[0])
    assert (unmasked - alone[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", HEADS)
def test_a_mask_says_which_tokens_there_are_and_no_more(kind: Any, ids: torch.Tensor) -> None:
    """Numbers of sequences, as some collators give, are neither weights nor places."""
    model = build(kind)
    mask = torch.ones_like(ids)
    mask[0, 9:] = mask[1, :3] = 0
    expected = model(ids, mask).logits
    for other in (mask.bool(), mask.float(), mask * (1 + torch.arange(13)), -mask):
        assert torch.equal(model(ids, other).logits, expected)
    assert not torch.equal(model(ids, mask.roll(1, 1)).logits, expected)


def test_what_padding_holds_is_in_no_mean(ids: torch.Tensor) -> None:
    model = build(sr.SoftmaxRNNForSequenceClassification)
    embedded, mask = model.model.embed_tokens(ids).detach(), torch.ones_like(ids)
    mask[:, 9:] = 0
    expected = model(inputs_embeds=embedded, attention_mask=mask).logits
    embedded[:, 9:] = torch.nan
    found = model(inputs_embeds=embedded, attention_mask=mask).logits
    assert torch.equal(found, expected)
    assert model(inputs_embeds=embedded).logits.isnan().all()


def test_the_mean_of_many_tokens_in_float16() -> None:
    """Their sum is beyond the range of float16."""
    model = build(sr.SoftmaxRNNForSequenceClassification, num_hidden_layers=1).float()
    model.model.norm.weight.data.fill_(100.0)
    model.score.weight.data.mul_(0.01)
    embedded = model.model.embed_tokens.weight[:1].detach().expand(1, 2048, -1)
    expected = model(inputs_embeds=embedded).logits
    found = model.half()(inputs_embeds=embedded.half()).logits
    assert found.isfinite().all()
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", HEADS)
def test_an_encoder_from_the_weights_of_a_decoder(
    kind: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    decoder = build(sr.SoftmaxRNNForCausalLM, is_causal=True)
    decoder.save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, is_causal=False).eval()
    found = model.model(ids)[0]
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    assert (model.model(other)[0][:, 0] - found[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["norm", "taylor:2"])
def test_packed_sequences_do_not_see_each_other(name: str, ids: torch.Tensor) -> None:
    model = build(sr.SoftmaxRNNForMaskedLM, name)
    places = torch.cat((torch.arange(5), torch.arange(8)))[None].expand(2, -1)
    alone = torch.cat([model(x).logits for x in ids.split((5, 8), 1)], 1)
    packed = model(ids, position_ids=places).logits
    torch.testing.assert_close(packed, alone)
    bounds = torch.tensor([0, 5, 13], dtype=torch.int32)
    row = model(ids[:1], position_ids=places[:1], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    torch.testing.assert_close(row.logits, alone[:1])
    assert (model(ids).logits - alone).abs().max() > 0.1
    shifted = torch.cat((torch.arange(6), torch.arange(7)))[None].expand(2, -1)
    assert (model(ids, position_ids=shifted).logits - alone).abs().max() > 0.1


def test_the_losses_are_those_of_transformers(ids: torch.Tensor) -> None:
    model = build(sr.SoftmaxRNNForMaskedLM)
    labels = torch.where(torch.rand(ids.shape) < 0.4, ids, -100)
    labels[:, 0] = ids[:, 0]  # the first token can be asked for, too
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits.float().flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss, expected)
    shifted = F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
    assert (out.loss - shifted).abs() > 1e-3
    model, classes = build(sr.SoftmaxRNNForSequenceClassification), torch.tensor([2, 0])
    out = model(ids, labels=classes)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, classes))
    assert model(ids, labels=classes, return_dict=False)[0] == out.loss
    pooled = model.model(ids)[0].mean(1) @ model.score.weight.T
    torch.testing.assert_close(out.logits, pooled)
    number = build(sr.SoftmaxRNNForSequenceClassification, num_labels=1)
    out, wanted = number(ids, labels=torch.ones(2).double()), torch.ones(2).double()
    torch.testing.assert_close(out.loss, F.mse_loss(out.logits[:, 0], wanted))


@pytest.mark.parametrize(("kind", "auto"), list(zip(HEADS, AUTO, strict=True)))
def test_saved_and_loaded(kind: Any, auto: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    model = build(kind, "based:2").float()
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is kind
    assert loaded.config.is_causal is False
    assert loaded.config.spec == model.config.spec
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    stack = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(stack(ids)[0], model.model(ids)[0])
    with pytest.raises(ValueError, match=r"must have is_causal=True, not False"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_checkpointed_gradients_are_the_same(kind: Any, ids: torch.Tensor) -> None:
    model = build(kind, "norm").train()
    labels = ids if kind is sr.SoftmaxRNNForMaskedLM else torch.tensor([1, 2])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_activations(model, {"use_reentrant": False})
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        found.append([x.grad.clone() for x in model.parameters()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)
    assert any(x.abs().max() > 0 for x in found[0])


def test_what_an_encoder_cannot_do_is_told(ids: torch.Tensor) -> None:
    model = build(sr.SoftmaxRNNForMaskedLM)
    assert model.config.use_cache is False
    assert not model.can_generate()
    with pytest.raises(ValueError, match=r"has no cache.*use_cache=False"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match="MaskedLM must have is_causal=False, not True"):
        build(sr.SoftmaxRNNForMaskedLM, is_causal=True)
    with pytest.raises(ValueError, match="CausalLM must have is_causal=True, not False"):
        build(sr.SoftmaxRNNForCausalLM)
    full = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask of its tokens, \[B, T\], not \[2, 1, 13, 13\]"):
        build(sr.SoftmaxRNNForSequenceClassification)(ids, attention_mask=full)
    classifier, places = build(sr.SoftmaxRNNForSequenceClassification), torch.arange(13)[None]
    alone = (places - 1).clamp(min=0)  # the first sequence is a token, and no position goes down
    packed_rows = [{"position_ids": x} for x in (places % 8, alone, places * 0, places * 2)]
    for packed in (*packed_rows, {"cu_seq_lens_q": torch.tensor([0, 8, 13])}):
        with pytest.raises(ValueError, match="this one holds several sequences"):
            classifier(ids[:1], **packed)
    whole = classifier(ids, position_ids=places, cu_seq_lens_q=torch.tensor([0, 13])).logits
    torch.testing.assert_close(whole, classifier(ids).logits)
    one = classifier(ids, position_ids=places + 7, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(one, whole)  # rotary positions are relative
