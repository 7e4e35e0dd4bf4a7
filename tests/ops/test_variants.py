"""The table of variants against the formulas of the authors' code, written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import softmax_rnn as sr
from cases import Shape, make_case
from softmax_rnn.ops import variants as variants_module
from softmax_rnn.ops.systems import SYSTEMS

# What the authors' training code computes, from scores s (causal ones are masked after): the
# weights before the mask, then what becomes of the rows. t is the number of visible keys.
SHAPE = Shape(kv_heads=4, queries=19, keys=19, value_width=8)
Finish = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


def _out_gate(x: Tensor, extras: dict[str, Tensor]) -> Tensor:
    return x * extras["output_gate"][..., None]


def _rms(x: Tensor, extras: dict[str, Tensor]) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], extras["norm_weight"], eps=2.0**-23)


def _layer(x: Tensor, extras: dict[str, Tensor]) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], extras["norm_weight"], extras["norm_bias"], eps=1e-5)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


EXP: Callable[[Tensor], Tensor] = torch.exp
C5: Callable[[Tensor], Tensor] = lambda s: s.clamp(max=5).exp()  # noqa: E731
AUTHORS: dict[str, tuple[Callable[[Tensor], Tensor], Finish]] = {
    "softmax": (EXP, lambda n, z, t, e: n / z),
    "norm": (EXP, lambda n, z, t, e: _unit(n)),
    "gate": (C5, lambda n, z, t, e: _out_gate(n / t, e)),
    "detached": (C5, lambda n, z, t, e: n / z.clamp(min=1).detach()),
    "clamped": (C5, lambda n, z, t, e: n / z.clamp(min=1)),
    "length": (C5, lambda n, z, t, e: n / t),
    "detached_gate": (C5, lambda n, z, t, e: _out_gate(n / (z + 1e-4).detach(), e)),
    "gate_only": (C5, lambda n, z, t, e: _out_gate(n, e)),
    "input_gate": (C5, lambda n, z, t, e: n / t),
    "both_gates": (C5, lambda n, z, t, e: _out_gate(n / t, e)),
    "norm_rms": (C5, lambda n, z, t, e: _rms(n, e)),
    "norm_rms_length": (C5, lambda n, z, t, e: _rms(n / t, e)),
    "norm_layer_length": (C5, lambda n, z, t, e: _layer(n / t, e)),
    "norm_l2_clamped": (C5, lambda n, z, t, e: _unit(n)),
    "norm_l2_length": (C5, lambda n, z, t, e: _unit(n / t)),
    "norm_gate_before": (EXP, lambda n, z, t, e: _unit(_out_gate(n, e))),
    "norm_gate_after": (EXP, lambda n, z, t, e: _out_gate(_unit(n), e)),
    "layer_input_gate": (C5, lambda n, z, t, e: _layer(n / t, e)),
    "layer_output_gate": (C5, lambda n, z, t, e: _layer(_out_gate(n / t, e), e)),
    "layer_both_gates": (C5, lambda n, z, t, e: _layer(_out_gate(n / t, e), e)),
    "softmax_plus_one": (EXP, lambda n, z, t, e: n / (z + 1)),
    "quadratic": (lambda s: s**2, lambda n, z, t, e: n),
    "power:2": (lambda s: s**2, lambda n, z, t, e: n / z),
    "taylor:2": (lambda s: 1 + s + s**2 / 2, lambda n, z, t, e: n / z),
}
# The same with a feature map and no 1/sqrt(d), but for relu_gate (scaled in the authors' code).
ELU: Callable[[Tensor], Tensor] = lambda x: F.elu(x) + 1  # noqa: E731
LINEAR: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Finish]] = {
    "linear_elu": (ELU, lambda s: s, lambda n, z, t, e: n / z),
    "linear_relu": (F.relu, lambda s: s, lambda n, z, t, e: n / (z + 1e-8)),
    "linear_cosine": (_unit, lambda s: s, lambda n, z, t, e: n / _power(t, e)),
    "taylor_elu:2": (ELU, lambda s: 1 + s + s**2 / 2, lambda n, z, t, e: n / z),
    "taylor_relu:2": (F.relu, lambda s: 1 + s + s**2 / 2, lambda n, z, t, e: n / (z + 1e-8)),
    "taylor_cosine:2": (_unit, lambda s: 1 + s + s**2 / 2, lambda n, z, t, e: n / _power(t, e)),
    "relu_gate": (F.relu, lambda s: s.clamp(max=5), lambda n, z, t, e: _out_gate(n / t, e)),
    "norm_relu": (F.relu, lambda s: s, lambda n, z, t, e: _unit(n)),
}


def _power(t: Tensor, extras: dict[str, Tensor]) -> Tensor:
    return t ** extras["length_power"][:, None, None]


@pytest.mark.parametrize("name", [*AUTHORS, *LINEAR])
def test_variant_is_the_authors(name: str) -> None:
    case = make_case(sr.variant(name), shape=SHAPE, spread=1.5)
    e = case.tensors
    scale = e["q"].shape[-1] ** -0.5
    if name in AUTHORS:
        weight, finish = AUTHORS[name]
        scores = scale * e["q"] @ e["k"].mT
    else:
        phi, weight, finish = LINEAR[name]
        scores = phi(e["q"]) @ phi(e["k"]).mT
        if name in ("relu_gate", "norm_relu"):
            scores = scale * scores
    v = e["v"] * e["input_gate"][..., None] if "input_gate" in e else e["v"]
    weights = weight(scores).tril()
    t = torch.arange(1, 20, dtype=torch.float64)[:, None]
    expected = finish(weights @ v, weights.sum(-1, keepdim=True), t, e)
    torch.testing.assert_close(case.run(sr.attention)["out"], expected)


@pytest.mark.parametrize(
    ("norm", "module"), [("rms", torch.nn.RMSNorm), ("layer", torch.nn.LayerNorm)]
)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
def test_epsilons_are_those_of_the_authors_modules(
    norm: str, module: type[torch.nn.Module], size: float
) -> None:
    """A norm of one value vector is the module's: of a short one it is the epsilon that counts."""
    v = size * torch.randn(1, 1, 1, 8)
    spec = sr.AttentionSpec(norm=norm)
    torch.testing.assert_close(sr.attention(v, v, v, spec), module(8)(v))


def test_every_row_has_its_formula() -> None:
    """Those of related systems are in test_systems.py."""
    names = [name.partition(":")[0] for name in sr.variants()]
    assert names == [*variants_module._PAPER, *SYSTEMS]
    assert {*AUTHORS, *LINEAR} == set([*sr.variants()][: len(variants_module._PAPER)])


def test_names() -> None:
    assert sr.variant("softmax_l2") == sr.variant("norm")
    assert sr.variant("taylor:4") == sr.variant("taylor", order=4)
    assert [sr.variant("taylor", order=n).floor for n in range(5)] == [0, 1, 0, 1, 0]
    assert sr.variant("taylor_elu:3").floor == 0
    assert sr.variant("taylor", order=0).order == 0
    with pytest.raises(ValueError, match="Did you mean 'linear_elu'"):
        sr.variant("linear_elo")
    with pytest.raises(ValueError, match="has no order"):
        sr.variant("gate", order=2)
    with pytest.raises(ValueError, match="not -1"):
        sr.variant("taylor", order=-1)
    with pytest.raises(ValueError, match="an integer >= 0"):
        sr.variant("taylor:-1")
    with pytest.raises(ValueError, match="was given as well"):
        sr.variant("taylor:2", order=3)
    with pytest.raises(ValueError, match="AttentionSpec or a variant's name, not 3"):
        sr.attention(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 3)  # type: ignore[arg-type]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing registered, and nothing stays."""
    monkeypatch.setattr(variants_module, "_REGISTERED", {})


def test_a_registered_variant_is_known_by_name(registry: None) -> None:
    spec = sr.AttentionSpec(series="taylor", order=3, floor=0.5)
    sr.register_variant("my-cubic_3", spec)
    sr.register_variant("my-cubic_3", spec)
    assert sr.variant("my-cubic_3") == sr.variants()["my-cubic_3"] == spec
    x = torch.randn(3, 1, 1, 5, 4).unbind(0)
    assert torch.equal(sr.attention(*x, "my-cubic_3"), sr.attention(*x, spec))
    with pytest.raises(ValueError, match="Did you mean 'my-cubic_3'"):
        sr.variant("my-cubic_4")
    with pytest.raises(ValueError, match="has no order"):
        sr.variant("my-cubic_3:2")


def test_options_of_a_registration_may_be_a_mapping(registry: None) -> None:
    sr.register_variant("mine", sr.AttentionSpec(), {"qk_dim": 8})
    assert sr.layer_options("mine") == sr.LayerOptions(qk_dim=8)
    sr.register_variant("mine", sr.AttentionSpec(), sr.LayerOptions(qk_dim=8))
    with pytest.raises(ValueError, match="Did you mean 'qk_dim'"):
        sr.register_variant("other", sr.AttentionSpec(), {"qk_dims": 8})
    with pytest.raises(ValueError, match="options must be LayerOptions, not 3"):
        sr.register_variant("other", sr.AttentionSpec(), 3)  # type: ignore[arg-type]


def test_a_registration_that_is_refused(registry: None) -> None:
    for name in ("", "a b", "a:2", "a=b", "a/b", "caf\u00e9", "a\n", 3):
        with pytest.raises(ValueError, match="letters, digits, '_' and '-' only"):
            sr.register_variant(name, sr.AttentionSpec())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be an AttentionSpec, not {}"):
        sr.register_variant("mine", {})  # type: ignore[arg-type]
    for name in ("softmax", "softmax_l2"):
        with pytest.raises(ValueError, match=f"variant '{name}' already exists with other fields"):
            sr.register_variant(name, sr.variant("gate"))
    with pytest.raises(ValueError, match=r"other options \(qk_dim: None there, 8 here\)\.$"):
        sr.register_variant("softmax", sr.AttentionSpec(), {"qk_dim": 8})
    sr.register_variant("softmax_l2", sr.variant("norm"))
    assert not variants_module._REGISTERED


def test_a_name_may_mean_options_as_well(registry: None) -> None:
    spec, options = sr.AttentionSpec(decay="token"), sr.LayerOptions(qk_dim=4)
    sr.register_variant("mine", spec, options)
    assert (sr.variant("mine"), sr.layer_options("mine")) == (spec, options)
    assert sr.Attention(16, 2, "mine").q_proj.out_features == 8
    with pytest.raises(ValueError, match=r"already exists with other options \(qk_dim: 4 there"):
        sr.register_variant("mine", spec)
    with pytest.raises(ValueError, match="options must be LayerOptions, not 8"):
        sr.register_variant("other", spec, 8)  # type: ignore[arg-type]


def test_a_name_without_a_number_is_told_each_time() -> None:
    x, decay = torch.randn(1, 1, 5, 4), -torch.rand(1, 1, 5)
    for _ in range(2):
        with pytest.warns(FutureWarning):
            sr.attention(x, x, x, "taylor")
        with pytest.warns(FutureWarning):
            sr.attention(x, x, x, "taylor+decay", log_decay=decay)


def test_any_variant_with_a_decay() -> None:
    for name in sr.variants():
        spec = sr.variant(name)
        if spec.decay != "none":
            with pytest.raises(ValueError, match=f"'{name}' already has a decay"):
                sr.variant(f"{name}+decay")
            continue
        assert sr.variant(f"{name}+decay") == replace(spec, decay="token")
        assert sr.layer_options(f"{name}+decay") == sr.layer_options(name)
    assert sr.variant("taylor:3+decay") == replace(sr.variant("taylor:3"), decay="token")
    for name in ("+decay", "softmax+decay+decay", "softmax+", "softmax+dekay", "taylor+decay:2"):
        with pytest.raises(ValueError, match="variant"):
            sr.variant(name)


def test_families_of_related_systems() -> None:
    assert sr.variant("window:9").window == sr.variant("window", order=9).window == 9
    assert sr.variant("window:100000").window == 100_000
    assert sr.variant("power_retention:4").order == 4
    assert [sr.variant(f"taylor_norm:{n}").floor for n in range(3)] == [0, 0, 0]
    assert sr.variant("window_taylor:1").floor == 1
    assert sr.layer_options("based:4") == sr.layer_options("based")
    with pytest.raises(ValueError, match="window must be an integer >= 1, not 0"):
        sr.variant("window:0")
    for name in ("power_retention", "rebased"):
        with pytest.raises(ValueError, match=f"{name}.* needs an even order, not 3"):
            sr.variant(f"{name}:3")


MODULE = """
from softmax_rnn import AttentionSpec, LayerOptions
spec = AttentionSpec(norm="rms")
fields = {"series": "power", "order": 3}
def function(): return AttentionSpec(series="taylor", order=5)
def fields_of(): return fields
def fails(): raise RuntimeError("no luck")
number = 3
pair = AttentionSpec(norm="rms"), LayerOptions(norm_weight=False)
both = {"spec": {"norm": "rms"}, "options": {"norm_weight": False}}
misspelt = {"spec": {"norm": "rms"}, "option": {}}
"""


def test_variants_of_packages(
    registry: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Entry points: read when they are asked for; a broken one names its package."""
    (tmp_path / "their_package.py").write_text(MODULE)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    objects = {
        **{"theirs": "spec", "their_cubic": "fields", "their_fifth": "function"},
        **{"their_third": "fields_of", "fails": "fails", "lacks": "nothing", "number": "number"},
        **{"their_pair": "pair", "their_both": "both", "misspelt": "misspelt"},
        **{"softmax": "fields", "norm_rms": "spec", "no name": "spec"},
    }
    lines = [f"{name} = their_package:{value}\n" for name, value in objects.items()]
    (info / "entry_points.txt").write_text("".join(["[softmax_rnn.variants]\n", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    for function in (variants_module._entry_points, variants_module._load):
        function.cache_clear()
    try:
        assert sr.variant("theirs") == sr.AttentionSpec(norm="rms")
        assert sr.variant("their_cubic") == sr.variant("power:3") == sr.variant("their_third")
        assert sr.variant("their_fifth").order == 5
        unweighted = sr.LayerOptions(norm_weight=False)
        assert sr.variant("their_pair") == sr.variant("their_both") == sr.variant("theirs")
        assert sr.layer_options("their_pair") == sr.layer_options("their_both") == unweighted
        assert sr.layer_options("theirs") == sr.LayerOptions()
        for name, reason in (
            ("misspelt", "Unknown field of a variant 'option'"),
            ("fails", "RuntimeError: no luck"),
            ("lacks", "AttributeError"),
            ("number", "must be an AttentionSpec, not 3"),
        ):
            with pytest.raises(ValueError, match=f"package 'their-package' .*{reason}"):
                sr.variant(name)
        assert sr.variant("softmax") == sr.AttentionSpec()  # the paper's names stay the paper's
        with pytest.warns(UserWarning, match="cannot be used") as caught:
            known = sr.variants()
        assert {"theirs", "their_cubic", "their_third", "their_fifth"} < set(known)
        assert not {"misspelt", "fails", "lacks", "number", "no name"} & set(known)
        assert known["softmax"] == sr.AttentionSpec()
        messages = "".join(str(warning.message) for warning in caught)
        assert "variant 'softmax' of the package 'their-package'" in messages
        sr.register_variant("theirs", sr.variant("theirs"))
        with pytest.raises(ValueError, match="already exists with other fields"):
            sr.register_variant("theirs", sr.AttentionSpec())
    finally:
        monkeypatch.undo()
        for function in (variants_module._entry_points, variants_module._load):
            function.cache_clear()


def test_two_packages_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(*values: str) -> Any:
        found = [EntryPoint("theirs", f"softmax_rnn.ops.variants:{x}", "group") for x in values]
        return lambda: {"theirs": found}

    variants_module._load.cache_clear()
    monkeypatch.setattr(variants_module, "_entry_points", points("_C5", "_C5"))
    assert sr.variant("theirs") == variants_module._C5
    variants_module._load.cache_clear()
    monkeypatch.setattr(variants_module, "_entry_points", points("_C5", "_C5_LENGTH"))
    with pytest.raises(ValueError, match="other fields"):
        sr.variant("theirs")
    variants_module._load.cache_clear()
