"""Rotary positions taken off again, as each family applies them."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from softmax_rnn.conversion.rotations import ROTATIONS, rotation_of, unrotated

TOKENS, WIDTH = 8, 8


def angles(order: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, T, ...], scaled as by YaRN; an angle per channel, or per pair once."""
    each = torch.arange(TOKENS).double()[:, None] * 0.3 ** torch.arange(WIDTH // 2).double()
    if order == "halves":
        each = torch.cat((each, each), -1)
    elif order == "neighbours":
        each = each.repeat_interleave(2, -1)
    return 1.2 * each.cos()[None], 1.2 * each.sin()[None]


def by_complex_numbers(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    function = import_module(
        "transformers.models.deepseek_v2.modeling_deepseek_v2"
    ).apply_rotary_emb
    found = function(q, k, torch.complex(cos, sin))
    return found[0], found[1]


# A family, and how it rotates; where it has other names, by_complex_numbers.
FAMILIES = {
    "llama": ("halves", "halves"),
    "cohere": ("neighbours", "neighbours"),
    "glm": ("neighbours", "halves"),
    "gpt_oss": ("halves", "once"),
    "complex": ("neighbours", "once"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extra", [0, 6])
@pytest.mark.parametrize("channels", ["first", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_rotation_is_found_and_taken_off(
    family: str, channels: str, extra: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    pairs, order = FAMILIES[family]
    q, k = (torch.randn(2, heads, 1, WIDTH).double().expand(-1, -1, TOKENS, -1) for heads in (4, 2))
    cos, sin = angles(order)
    if family == "complex":
        turned = by_complex_numbers(q.float(), k.float(), cos.float(), sin.float())
        embeddings: object = torch.complex(cos, sin)
    else:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        turned = module.apply_rotary_pos_emb(q, k, cos, sin)
        embeddings = (cos.to(dtype), sin.to(dtype))
    rest = torch.randn(2, 1, 1, extra).double()
    found, plain = [], []
    for x, y in zip(turned, (q, k), strict=True):
        same = rest.expand(-1, x.shape[1], TOKENS, -1)
        order_of = (lambda a, b: (a, b)) if channels == "first" else (lambda a, b: (b, a))
        found.append(torch.cat(order_of(x.double(), same), -1).to(dtype))
        plain.append(torch.cat(order_of(y, same), -1))
    name = rotation_of(found[0], found[1], embeddings)
    assert name == f"{channels if extra else 'first'} {pairs} {order}"
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5 if family == "complex" else 1e-12
    for x, y in zip(found, plain, strict=True):
        back = unrotated(x, embeddings, name).double()
        # Their scale is 1.2 in the angles, so that it goes as well.
        torch.testing.assert_close(back, y, rtol=tolerance, atol=tolerance)


def test_what_is_no_rotation() -> None:
    x = torch.randn(1, 2, 1, WIDTH).expand(-1, -1, TOKENS, -1)
    assert rotation_of(x, x, None) == "none"
    assert rotation_of(torch.randn(1, 2, TOKENS, WIDTH), x, angles("halves")) is None
    assert rotation_of(0 * x, x, None) is None  # nothing to be seen
    rotation = next(name for name in ROTATIONS if name != "none")
    for embeddings in (None, (x[0], x[0], x[0]), angles("halves")[:1]):
        with pytest.raises(ValueError, match="are not a pair of cosines and sines"):
            unrotated(x, embeddings, rotation)
    with pytest.raises(ValueError, match=r"cannot have rotated 4 tokens of width 8"):
        unrotated(x[:, :, :4], angles("halves"), rotation)


def test_angles_that_change_in_place() -> None:
    """Positions of a token are kept for the next layer, but not after a change."""
    turn = torch.rand(1, 1, 4).repeat(1, 1, 2)
    angles, x, way = (turn.cos(), turn.sin()), torch.randn(1, 1, 1, 8), "first halves halves"
    with torch.no_grad():
        unrotated(x, angles, way)
        angles[0].copy_((turn + 1).cos())
        angles[1].copy_((turn + 1).sin())
        found = unrotated(x, angles, way)
        expected = unrotated(x, tuple(y.clone() for y in angles), way)
    assert torch.equal(found, expected)
    with torch.inference_mode():
        unrotated(x, angles, way)
    unrotated(x.clone().requires_grad_(), angles, way).sum().backward()
