"""How many key/value pairs a state can hold: bounds, estimates and simulations.

docs/capacity.md derives them. A key's weight for its own query is the signal; the weights of the
other keys are the interference.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from scipy.special import ndtr, roots_hermitenorm, roots_jacobi
from torch import Tensor

from softmax_rnn.ops import AttentionSpec, PowerSeries, degrees, dimension, resolve

_NODES = 200  # of each quadrature


def largest_rank(spec: AttentionSpec | str, width: int) -> int:
    """The largest rank of a matrix of weights ``f(q_i . k_j)``, for any number of keys.

    It is the number of linearly independent monomials: those in the state, or fewer for keys of
    one length (the feature map ``cosine``), where ``|k|^2`` is constant. If coefficients have both
    signs, the rank can be lower still.

    Raises:
        ValueError: for a spec without a state (``monomials.state_size``).
    """
    spec = resolve(spec)
    degrees(spec)
    coefficients = PowerSeries.known_part(spec).coefficients
    powers = [n for n, a in enumerate(coefficients or ()) if a]
    if spec.feature_map == "cosine":
        # On the sphere a power contains every lower one of its parity, times |k|^2 = 1.
        powers = [max(same) for p in (0, 1) if (same := [n for n in powers if n % 2 == p])]
    return sum(dimension(width, n) for n in powers)


def effective_features(spec: AttentionSpec | str, width: int, score: float = 1.0) -> float:
    """The squared weight of a key for itself, over the mean square of the other keys' weights.

    ``f(score)^2 / E[f(score * cos)^2]`` for the angle between random directions. ``S`` other keys
    interfere as much as ``S / effective_features`` weights like that of the right key.

    Args:
        spec: a series of queries and keys as they are, exp included.
        width: key width, at least 2.
        score: the score of a key with itself.

    Raises:
        ValueError: if the spec has a feature map other than ``identity`` or ``cosine``, or the
            width is below 2.
    """
    spec = resolve(spec)
    if spec.feature_map not in ("identity", "cosine"):
        raise ValueError(
            f"feature_map={spec.feature_map!r}: mapped keys have no random directions; use "
            "'identity' or 'cosine'."
        )
    if width < 2:
        raise ValueError(f"width must be at least 2, not {width!r}.")
    cosines, shares = roots_jacobi(_NODES, (width - 3) / 2, (width - 3) / 2)
    weights = _weights(spec, torch.from_numpy(np.append(cosines, 1.0)) * score).numpy()
    return float(shares.sum() / (shares @ (weights[:-1] / weights[-1]) ** 2))


def recall_accuracy(pairs: float, features: float, values: int) -> float:
    """How often the right one of ``values`` orthonormal values has the largest sum of weights.

    An estimate, which takes the interference as Gaussian.

    Args:
        pairs: keys other than the right one, with random values.
        features: :func:`effective_features`.
        values: number of values, and of value channels.
    """
    signal = math.sqrt(features * values / pairs)
    noise, shares = roots_hermitenorm(_NODES)
    return float(shares @ ndtr(signal + noise) ** (values - 1) / shares.sum())


def capacity(features: float, values: int, accuracy: float = 0.5) -> float:
    """The ``pairs`` at which :func:`recall_accuracy` falls to ``accuracy``.

    Raises:
        ValueError: if the accuracy is not between chance, ``1 / values``, and 1.
    """
    if not 1 / values < accuracy < 1:
        raise ValueError(
            f"accuracy must be above chance, {1 / values:.3g}, and below 1, not {accuracy!r}."
        )
    # The accuracy depends on the signal alone.
    signal = brentq(lambda s: recall_accuracy(values / s**2, 1.0, values) - accuracy, 1e-6, 50.0)
    return features * values / signal**2


def random_recall(
    spec: AttentionSpec | str,
    width: int,
    pairs: int,
    values: int,
    *,
    score: float = 1.0,
    rows: int = 20,
    seed: int = 0,
) -> float:
    """The measured accuracy of recall with random keys of one length, and random values.

    The value with the largest sum of weights is the answer. A row sum > 0 would not change it.

    Args:
        spec: the series of the weights.
        width: key width.
        pairs: keys, each of which is also the query, once.
        values: number of values; each key's is drawn independently.
        score: the score of a key with itself.
        rows: how many sets of pairs to draw.
        seed: of the draws.
    """
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, pairs, width, generator=draw, dtype=torch.float64)
    keys = F.normalize(keys, dim=-1)
    answers = torch.randint(values, (rows, pairs), generator=draw)
    sums = _weights(resolve(spec), score * keys @ keys.mT) @ F.one_hot(answers, values).double()
    return float((sums.argmax(-1) == answers).double().mean())


def learned_recall(
    spec: AttentionSpec | str,
    width: int,
    pairs: int,
    values: int,
    *,
    keys: int | None = None,
    value_width: int | None = None,
    distinct: bool = False,
    spacing: int | None = None,
    steps: int = 500,
    seed: int = 0,
) -> float:
    """The accuracy of recall with queries and keys that gradient descent has found.

    A row is a random subset of a vocabulary of keys, each with a random value; every key of the row
    is asked for. The sum of weighted values is normalised to unit length, as the variants with an
    L2 norm do.

    Args:
        spec: the series of the weights.
        width: width of queries and keys.
        pairs: keys in a row.
        values: number of values.
        keys: size of the vocabulary of keys; by default all keys are in every row.
        value_width: width of the vectors of values, which are then learned, as are those that read
            them; by default they are orthonormal and fixed.
        distinct: whether the values of a row differ.
        spacing: if given, keys are told apart by rotary positions alone, ``spacing`` tokens apart.
            The query is one token after its key and sees no later key. ``keys`` is ignored.
        steps: steps of AdamW, of 32 rows each.
        seed: of the start and the draws.
    """
    spec, keys = resolve(spec), pairs if spacing else keys or pairs
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) / math.sqrt(shape[-1])

    q = normal(1 if spacing else keys, width)
    k, log_scale = q.clone(), torch.tensor(2.0)
    written = normal(values, value_width) if value_width else torch.eye(values)
    read = written.clone()
    # Scores start at 1; longer keys are learned where the series gains from them.
    learned = [q, k, log_scale, *([written, read] if value_width else [])]
    for tensor in learned:
        tensor.requires_grad_()

    def predict(rows: int) -> tuple[Tensor, Tensor]:
        """Logits [rows, pairs, values] and answers [rows, pairs]."""
        chosen = torch.rand(rows, keys, generator=draw).argsort(-1)[:, :pairs]
        chosen = chosen.sort(-1).values if spacing else chosen
        answers = (
            torch.rand(rows, values, generator=draw).argsort(-1)[:, :pairs]
            if distinct
            else torch.randint(values, (rows, pairs), generator=draw)
        )
        if spacing:
            places = spacing * torch.arange(keys)
            weights = _weights(spec, _rotated(q, places + 1) @ _rotated(k, places).T).tril()
        else:
            weights = _weights(spec, q @ k.T)
        weights = weights[chosen[:, :, None], chosen[:, None, :]]
        return log_scale.exp() * F.normalize(weights @ written[answers], dim=-1) @ read.T, answers

    optimizer = torch.optim.AdamW(learned, lr=0.02, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        logits, answers = predict(32)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, answers = predict(200)
    return float((logits.argmax(-1) == answers).float().mean())


def _weights(spec: AttentionSpec, scores: Tensor) -> Tensor:
    return PowerSeries.known_part(spec)(scores)


def _rotated(x: Tensor, places: Tensor) -> Tensor:
    """``x`` [1, d] with Llama's rotary positions at ``places`` [T]; [T, d]."""
    width = x.shape[-1]
    angles = places[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
