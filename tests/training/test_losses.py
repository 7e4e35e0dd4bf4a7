"""The loss of every token, against the definition in float64."""

from __future__ import annotations

import torch

import softmax_rnn as sr
from softmax_rnn.training.losses import autocast, token_losses


def test_every_token_of_padded_rows(batch: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    config = sr.SoftmaxRNNConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention="norm",
    )
    model = sr.SoftmaxRNNForCausalLM(config).eval()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    found = token_losses(model, {**batch, "labels": labels})
    assert not found.losses.requires_grad
    assert torch.equal(found.predicted, mask[:, 1:].bool())
    with torch.no_grad():
        chances = model.double()(**batch).logits.log_softmax(-1)
    for row in range(len(ids)):
        for place in range(1, ids.shape[1]):
            loss, right = (x[row, place - 1].item() for x in (found.losses, found.right))
            if not mask[row, place]:
                assert (loss, right) == (0, False)
                continue
            each = chances[row, place - 1]
            assert abs(loss + each[ids[row, place]].item()) < 1e-5
            assert right == (int(each.argmax()) == int(ids[row, place]))


def test_the_precision_of_a_run() -> None:
    cpu = torch.device("cpu")
    x = torch.ones(2, 2)
    for precision, dtype in (("auto", torch.float32), ("fp32", torch.float32)):
        with autocast(cpu, precision):  # type: ignore[arg-type]
            assert (x @ x).dtype == dtype
    with autocast(cpu, "bf16"):
        assert (x @ x).dtype == torch.bfloat16
