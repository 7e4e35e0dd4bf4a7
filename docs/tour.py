# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour: from three tokens to why softmax wins
#
# Softmax attention is a sum of RNNs, one for each power of `q . k`. This page builds them by hand, adds them
# up, and looks at what is inside. It needs `pip install '.[report]'` and runs in seconds; its source is
# `docs/tour.py`, and `make tour` runs it again. [The paper beside its code](equations.md) has the same
# in formulas.

# %%
import json
import math
import re
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import softmax_rnn as sr

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.titlesize": 9})


def show(name, x):
    """Print a tensor with two digits."""
    numbers = [[f"{number + 0.0:6.2f}" for number in row] for row in x.round(decimals=2).tolist()]
    print(f"{name}:", *("  ".join(row) for row in numbers), sep="\n  ")


# %% [markdown]
# ## Three tokens with two numbers each
#
# A token asks with its query, is found by its key, and gives its value. Token `t` sees the tokens up to
# itself. Their weights are `exp(q_t . k_s)`, divided by the sum of the row.

# %%
q = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
k = torch.tensor([[1.0, 0.5], [0.0, 1.0], [-0.5, 0.5]])
v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

scores = q @ k.T
weights = scores.exp().tril()  # later tokens have no weight
softmax = weights / weights.sum(1, keepdim=True) @ v
show("scores", scores)
show("weights", weights)
show("softmax attention", softmax)

# %% [markdown]
# ## One RNN for each power
#
# The exponential is a series, `exp(x) = 1 + x + x^2/2 + x^3/6 + ...`, so the sum over the keys is a sum of
# sums, one for each power of the score. And a power can be taken apart: `(q . k)^2` is the sum of all
# products `q_i q_j k_i k_j`, an inner product of the products of `q` with those of `k`. So the keys can be
# added up *before* the query is known. What is added up is the state of an RNN:


# %%
def products(x, n):
    """All products of n entries of a vector."""
    result = torch.ones(1)
    for _ in range(n):
        result = torch.outer(result, x).flatten()
    return result


def rnn(q, k, v, n):
    """The RNN of power n: its outputs, and its state after each token."""
    state, outputs, states = torch.zeros(k.shape[1] ** n, v.shape[1]), [], []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        state = state + torch.outer(products(k_t, n), v_t)  # the token enters the state
        outputs.append(products(q_t, n) @ state / math.factorial(n))  # the query reads it
        states.append(state)
    return torch.stack(outputs), states


for n in range(3):
    outputs, _ = rnn(q, k, v, n)
    directly = (scores**n / math.factorial(n)).tril() @ v
    show(f"RNN of power {n}", outputs)
    print("  the same as with all pairs:", torch.allclose(outputs, directly))

# %% [markdown]
# Power 0 is a sum of all values (divided by their number, a mean). Power 1 is linear attention. No RNN looks
# back: each has its state and nothing else.
#
# ## Their sum approaches softmax
#
# The denominator is the same sum with values 1. So we give the values a third channel of ones, and divide
# by it at the end.

# %%
with_ones = torch.cat([v, torch.ones(3, 1)], dim=1)
total = torch.zeros(3, 3)
for n in range(11):
    total = total + rnn(q, k, with_ones, n)[0]
    difference = (total[:, :2] / total[:, 2:] - softmax).abs().max()
    print(f"powers 0 to {n:2}: {difference:.0e} from softmax")

# %% [markdown]
# The library computes the same, in chunks, in linear time, with every gradient:

# %%
out, state = sr.attention(
    *(x[None, None] for x in (q, k, v)),
    sr.AttentionSpec(series="taylor", order=10, scale=1.0),
    return_state=True,
)
print("sr.attention is our sum:", torch.allclose(out[0, 0], total[:, :2] / total[:, 2:]))

# %% [markdown]
# ## The states as pictures
#
# A row for every product of `n` entries of the key, a column for every channel of the value. In the state of
# power 2, the rows of `k_1 k_2` and `k_2 k_1` are equal. The library keeps each only once
# ([monomials](recurrent.md#monomials-instead-of-kronecker-powers)). Blue is positive, red is negative.

# %%
fig, axes = plt.subplots(3, 4, figsize=(6.4, 4.4), layout="constrained")
for n in range(4):
    for t, state in enumerate(rnn(q, k, v, n)[1]):
        axes[t, n].imshow(state.numpy(), cmap="RdBu", vmin=-1.5, vmax=1.5, aspect="auto")
        axes[t, n].set(xticks=[], yticks=range(2**n), yticklabels=[])
    axes[0, n].set_title(f"power {n}: {2**n} x 2")
for t in range(3):
    axes[t, 0].set_ylabel(f"after token {t + 1}")
plt.show()

# %% [markdown]
# ## A real sentence
#
# The scores of a head (layer 11, head 0) of SmolLM2-135M-Instruct for one sentence, as `docs/tour_scores.py`
# has recorded them. Below are the weights of series of some orders, beside those of softmax. [The slider](slider.html)
# (`docs/slider.html`, a page to be opened in a browser) shows every order up to 20. A row is a token that
# asks, a column one that it sees; blue is a positive share of the row, red a negative one.

# %%
text = Path("slider.html").read_text(encoding="utf-8")
data = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)[1])
words, real = data["words"], torch.tensor(data["scores"])
seen = torch.ones_like(real).tril()


def shares(weights):
    """Weights as shares of their row."""
    weights = weights * seen
    return weights / weights.sum(1, keepdim=True)


def of_order(n):
    """The weights of exp's series up to an order."""
    return shares(sum(real**i / math.factorial(i) for i in range(n + 1)))


exact = shares(real.exp())
fig, axes = plt.subplots(2, 4, figsize=(9, 5.2), layout="constrained", sharex=True, sharey=True)
for axis, n in zip(axes.flat, [0, 1, 2, 4, 6, 8, 10, None], strict=True):
    shown = exact if n is None else of_order(n)
    axis.imshow(shown.numpy(), cmap="RdBu", vmin=-1, vmax=1)
    axis.set_title("softmax" if n is None else f"powers 0 to {n}")
    axis.set_yticks(range(len(words)), words, fontsize=7)
    axis.set_xticks(range(len(words)), words, fontsize=7, rotation=90)
plt.show()
print(f"scores from {real[seen > 0].min():.1f} to {real[seen > 0].max():.1f}")
for n in (0, 1, 2, 4, 6, 8, 10, 14):
    print(
        f"powers 0 to {n:2}: largest difference of a weight {(of_order(n) - exact).abs().max():.2f}"
    )

# %% [markdown]
# Order 0 sees every token alike. Order 1 can be negative, which makes the sum of a row small and its other
# shares too large: see the second `the`. Even orders are positive everywhere, and with each the picture gets
# sharper: large scores need many powers, since `x^n / n!` grows until `n` reaches `x`.
#
# ## Why a norm can take the place of the denominator
#
# The denominator is one positive number per token: it changes the length of the output and not its direction.
# A norm removes the length anyway. So the numerator, scaled to length 1, is softmax attention scaled to
# length 1, exactly:

# %%
numerator = weights @ v


def unit(x):
    """Rows of length 1."""
    return x / x.norm(dim=1, keepdim=True)


show("numerator, scaled to length 1", unit(numerator))
print("softmax, scaled to length 1, is the same:", torch.allclose(unit(numerator), unit(softmax)))
ours = sr.attention(
    *(x[None, None] for x in (q, k, v)), sr.AttentionSpec(denominator="none", norm="l2", scale=1.0)
)
print("sr.attention agrees:", torch.allclose(ours[0, 0], unit(numerator)))

# %% [markdown]
# ## What a decay does
#
# If each token first multiplies the state by a factor below 1, old tokens fade: a forget gate, the same for
# every power. In the picture, each weight is multiplied by the factor, here 0.7, to the power of its distance
# to the diagonal. Then the same in numbers, for power 1 and random queries, keys and values: a state that fades
# gives the outputs of attention whose weights are multiplied so.

# %%
gates = torch.full((len(words),), 0.7)
log_decay = gates.log()
since = log_decay.cumsum(0)
faded = (since[:, None] - since).exp()  # 0.7 to the power of the distance
fig, axes = plt.subplots(1, 2, figsize=(6.4, 3.4), layout="constrained", sharey=True)
for axis, shown, title in zip(
    axes, (exact, shares(real.exp() * faded)), ("softmax", "with a decay"), strict=True
):
    axis.imshow(shown.numpy(), cmap="RdBu", vmin=-1, vmax=1)
    axis.set_title(title)
    axis.set_yticks(range(len(words)), words, fontsize=7)
    axis.set_xticks(range(len(words)), words, fontsize=7, rotation=90)
plt.show()

x = torch.randn(3, 1, 1, len(words), 4).unbind(0)
state, outputs = torch.zeros(4, 4), []
for q_t, k_t, v_t in zip(*(each[0, 0] for each in x), strict=True):
    state = 0.7 * state + torch.outer(k_t, v_t)
    outputs.append(q_t @ state)
spec = sr.AttentionSpec(series="power", order=1, denominator="none", decay="token", scale=1.0)
out = sr.attention(*x, spec, log_decay=log_decay[None, None])
print(
    "a state with a forget gate is attention with a decay:",
    torch.allclose(out[0, 0], torch.stack(outputs)),
)

# %% [markdown]
# ## How much a state recalls
#
# Store pairs of random keys and one of 16 values, then ask with each key. A state has a fixed number of rows,
# and more pairs than it can hold disturb each other; softmax keeps every key. [How many](capacity.md) can be
# predicted. The table has the share of right answers; a guess is right in 6%.

# %%
width, values = 8, 16
orders = {"power 1": 1, "powers to 2": 2, "powers to 4": 4, "softmax": None}
print(f"{'pairs':12}", *(f"{pairs:>5}" for pairs in (8, 32, 128, 512)))
for name, order in orders.items():
    right = []
    for pairs in (8, 32, 128, 512):
        torch.manual_seed(pairs)
        key = unit(torch.randn(pairs, width))
        answer = torch.randint(values, (pairs,))
        series = (
            {} if order is None else {"series": "power" if order == 1 else "taylor", "order": order}
        )
        # Softmax may be sharp; a short series is near exp for small scores only.
        scale = 16.0 if order is None else 3.0
        spec = sr.AttentionSpec(scale=scale, denominator="none", norm="l2", **series)
        value = torch.eye(values)[answer]
        read = sr.attention(*(x[None, None] for x in (key, key, value)), spec, causal=False)
        right.append((read[0, 0].argmax(1) == answer).double().mean())
    print(f"{name:12}", *(f"{share:5.0%}" for share in right))

# %% [markdown]
# ## Why softmax wins
#
# A higher power distinguishes more, and costs a larger state. This is what trained models say, in this
# repository's own runs ([figure 5](results/figure5.md): three seeds, 1.5 million tokens of source code):

# %%
page = Path("results/figure5.md").read_text(encoding="utf-8")
gaps = {
    int(n): float(gap)
    for n, gap in re.findall(r"^\| `taylor:(\d+)` .*\| ([+-][\d.]+) \[", page, re.M)
}
print("order  test loss above softmax  rows of the state (heads of width 32)")
for n, gap in gaps.items():
    print(f"{n:5}  {gap:22.3f}  {math.comb(32 + n, n):12,}")

fig, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
axis.semilogy(list(gaps), list(gaps.values()), "o-")
axis.set(xlabel="highest power", ylabel="test loss above softmax, nats")
plt.show()

# %% [markdown]
# Each power brings the loss closer to softmax's, and by order 10 almost nothing is left; but its state would have
# more than a billion rows. What the rows are for shows when a model must find things again: one of 16 pairs
# ([recall](results/recall.md), three seeds, keys of width 4).

# %%
page = Path("results/recall.md").read_text(encoding="utf-8")
found = re.search(r"^\| `taylor` \| [\d.]+ \| 4 \| (.*) \|$", page, re.M)[1].split(" | ")
for n, share in enumerate(found, 1):
    print(f"powers to {n}: {float(share.split()[0]):6.1%} right, {math.comb(4 + n, n):3} rows")

# %% [markdown]
# And the price of every power is a cache: here of the small model that is timed in
# [performance](performance.md), for one sequence.

# %%
path = Path("../benchmarks/results/decode-cpu-xeon.json")
rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
kept = {(row["name"], row["length"]): row["cache_bytes"] for row in rows if row["batch"] == 1}
print("tokens   softmax keeps   powers to 2 keep")
for length in (128, 512, 2048, 8192):
    sizes = (kept[name, length] / 2**20 for name in ("softmax", "taylor:2"))
    print(f"{length:6}", *(f"{size:12.1f} MiB" for size in sizes))

# %% [markdown]
# Softmax has every power for the price of keeping the keys, and up to some length that is even the smaller
# price. That is the paper's answer: **softmax is the RNN with an infinite state, stored as a cache.** The norm
# may replace its denominator (for a while: [the gaps](results/gaps.md)); no feature map of power 1 replaces
# its powers. What an RNN of few powers needs to come close on long texts is to forget
# ([the family](results/family.md)).
#
# Where to go on: [compare attentions on your text](howto/compare.md), [run a model as an RNN](howto/serve.md),
# [every equation](equations.md), [what a state can hold](capacity.md).
