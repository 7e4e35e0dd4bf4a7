"""Attentions of a researcher's own in a comparison: fields in a file, or a variant renamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_up import made_up
from softmax_rnn._utils.plain_yaml import format_yaml, parse_yaml
from softmax_rnn.cli.main import main
from softmax_rnn.experiments.compare import compare_configs
from softmax_rnn.ops.spec import AttentionSpec
from softmax_rnn.ops.variants import resolve_layer, variant
from softmax_rnn.report.outputs import find_runs, report
from softmax_rnn.report.table import results
from softmax_rnn.training import RunConfig
from softmax_rnn.training.folder import RunFolder
from tiny import options, tiny

FIELDS = {"feature_map": "elu1", "series": "power", "order": 2, "norm": "rms"}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    file = tmp_path / "spec.yaml"
    file.write_text(format_yaml(FIELDS))
    return file


def test_a_file_and_another_name_for_a_variant(spec_file: Path, tmp_path: Path) -> None:
    words = ["softmax", f"mine={spec_file}", "early=taylor:8"]
    runs = compare_configs(words, [0, 3], RunConfig(), tmp_path)
    assert [run.name for run in runs[:3]] == ["softmax-seed0", "mine-seed0", "early-seed0"]
    assert runs[4].name == "mine-seed3"
    assert runs[1].config.attention == AttentionSpec(**FIELDS).to_dict()  # all fields, not a path
    assert runs[2].config.spec == variant("taylor:8")
    assert runs[0].config.attention == "softmax"


def test_a_file_may_change_a_variant(tmp_path: Path) -> None:
    (tmp_path / "spec.yml").write_text("variant: gate\nclamp: 3\n")
    (run,) = compare_configs([f"gate-3={tmp_path / 'spec.yml'}"], [0], RunConfig(), tmp_path)
    assert run.config.spec == AttentionSpec.from_dict({**variant("gate").to_dict(), "clamp": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nrom: l2", r"spec.yaml: Unknown attention field 'nrom'. Did you mean 'norm'"),
        ("norm: l3", r"spec.yaml: Unknown norm 'l3'. Did you mean 'l2'"),
        ("series: taylor\norder: many", r"spec.yaml: order must be an integer >= 0, not 'many'"),
        ("variant: nrom", r"spec.yaml: Unknown variant 'nrom'. Did you mean 'norm'"),
        ("variant: [norm]", r"spec.yaml: spec must be .* not \['norm'\]"),
        ("- norm", r"spec.yaml: An attention's fields must be a mapping, not \['norm'\]"),
        ("", r"spec.yaml: An attention's fields must be a mapping, not None"),
        ("norm: [", r"spec.yaml is not YAML"),
        ("1: 2", r"spec.yaml: Unknown attention field 1"),
        ("clamp: .nan", r"spec.yaml: clamp must be a finite number"),
    ],
)
def test_an_error_names_file_and_field(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        compare_configs(["softmax", f"mine={tmp_path / 'spec.yaml'}"], [0], RunConfig(), tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["norm=spec.yaml"], "'norm' cannot be the name of 'spec.yaml': .* of another variant"),
        (["softmax_l2=gate"], "'softmax_l2' cannot be the name of 'gate'"),
        (["my norm=norm"], "'my norm' cannot be the name .* letters, digits, _ and -"),
        (["../mine=norm"], "'../mine' cannot be the name"),
        (["=norm"], "'' cannot be the name"),
        (["mine="], "Unknown variant ''"),
        (["mine=nrom"], "Unknown variant 'nrom'. Did you mean 'norm'"),
        (["mine=other.yaml"], "There is no file other.yaml"),
        (["norm", "mine=norm"], "'norm' and 'mine=norm' are the same variant"),
        (["mine=norm", "mine=gate"], "The name 'mine' of 'mine=gate' is already taken"),
        (["taylor:4", "taylor-4=gate"], "The name 'taylor-4' of 'taylor-4=gate' is already taken"),
    ],
)
def test_names_are_checked(
    words: list[str], message: str, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spec_file.parent)
    with pytest.raises(ValueError, match=message):
        compare_configs(words, [0], RunConfig(), Path("runs"))


def own_run(root: Path, name: str, seed: int, fields: Any = FIELDS) -> RunFolder:
    """A finished run in the folder that ``compare`` gives it."""
    made = made_up(root / "made", "norm", seed, 1.52)
    RunConfig(attention=AttentionSpec(**fields).to_dict(), seed=seed).save(made.config_file)
    made.path.rename(root / f"{name}-seed{seed}")
    return RunFolder(root / f"{name}-seed{seed}")


def test_the_name_stands_in_table_figure_and_page(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, "softmax", seed, 1.5) for seed in (0, 1)]
    runs += [own_run(tmp_path, "mine", seed) for seed in (0, 1)]
    table, paths = report(find_runs(tmp_path), tmp_path)
    assert list(table.variant) == ["softmax", "mine"]
    assert list(table.seeds) == [2, 2]
    assert table.difference.notna().tolist() == [False, True]
    for path in paths:
        if path.suffix != ".png":
            assert "mine" in path.read_text(), path
    assert "feature_map: elu1" in (tmp_path / "report.html").read_text()


def test_one_name_for_two_attentions_is_refused(tmp_path: Path) -> None:
    runs = [
        own_run(tmp_path / "a", "mine", 0),
        own_run(tmp_path / "b", "mine", 1, {**FIELDS, "order": 3}),
    ]
    with pytest.raises(ValueError, match="a/mine-seed0 and .*b/mine-seed1 have one name, 'mine'"):
        results(runs)


def test_a_folder_cannot_claim_the_name_of_a_variant(tmp_path: Path) -> None:
    fields = "feature_map=elu1, series=power, order=2, norm=rms"
    for name in ("norm", "a b", "taylor:4"):
        assert list(results([own_run(tmp_path, name, 0)]).variant) == [fields]


def test_compare_from_a_file_to_a_report(
    texts: Path,
    spec_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "runs"
    words = ["compare", "softmax", f"mine={spec_file}", *options(texts, out)]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "mine-seed0" in shown
    assert "2 to run" in shown
    assert not out.exists()
    assert main(words) == 0
    ended = capsys.readouterr()
    assert ended.err.count("mine-seed0  ") == 1  # one line per run where there is no terminal
    assert "mine" in ended.out
    saved = parse_yaml((out / "mine-seed0" / "config.yaml").read_bytes(), "config.yaml")
    assert AttentionSpec.from_dict(saved["attention"]) == AttentionSpec(**FIELDS)
    assert main(["report", str(out)]) == 0
    assert "mine" in capsys.readouterr().out
    spec_file.write_text(format_yaml({**FIELDS, "order": 3}))
    assert main(words) == 2
    assert "mine-seed0 holds a run with another configuration" in capsys.readouterr().err


def test_own_attentions_differ_in_nothing_else(
    texts: Path, spec_file: Path, tmp_path: Path
) -> None:
    for run in compare_configs(["norm", f"mine={spec_file}"], [5], tiny(texts), tmp_path):
        fields = run.config.to_dict() | {"attention": "softmax", "layer": {}, "seed": 0}
        assert fields == tiny(texts).to_dict()


def test_a_file_gives_the_options_of_a_layer(texts: Path, tmp_path: Path) -> None:
    """Its own, and those of the variant that it starts from."""
    mine, narrow = tmp_path / "mine.yaml", tmp_path / "narrow.yaml"
    mine.write_text("variant: mamba2\nlayer: {skip: false}\n")
    narrow.write_text("norm: l2\nlayer: {qk_dim: 4}\n")
    words = [f"mine={mine}", f"narrow={narrow}", "early=retnet", "mamba2"]
    configs = [run.config for run in compare_configs(words, [0], tiny(texts), tmp_path)]
    own, small, early, plain = (config.variant for config in configs)
    assert own.spec == plain.spec
    assert own.options == plain.options.replaced({"skip": False})
    assert (small.spec.norm, small.options.qk_dim) == ("l2", 4)
    assert early == resolve_layer("retnet")


def test_variants_of_one_spec_have_other_layers(texts: Path, tmp_path: Path) -> None:
    words = ["performer", "hedgehog", "taylor:2", "based"]
    assert len(compare_configs(words, [0], tiny(texts), tmp_path)) == 4
    with pytest.raises(ValueError, match="are the same variant"):
        compare_configs(["based", "mine=based"], [0], tiny(texts), tmp_path)
