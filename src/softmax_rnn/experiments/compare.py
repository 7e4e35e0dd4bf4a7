"""Plan the runs of a comparison: same data, same initial values, only the attention differs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from softmax_rnn._utils.plain_yaml import parse_yaml
from softmax_rnn.experiments.plan import PlannedRun, require_different, run_folder
from softmax_rnn.ops import AttentionSpec, Variant, resolve_layer
from softmax_rnn.report.table import may_name
from softmax_rnn.training.config import RunConfig


def compare_configs(
    words: Sequence[str], seeds: Sequence[int], base: RunConfig, root: Path
) -> list[PlannedRun]:
    """One run per variant and seed, all else as in ``base``, in folders below ``root``.

    Args:
        words: what to train. Each is the name of a variant (``taylor:4``), a new name for one
            (``early=taylor:8``), or a name for a file with fields of :class:`AttentionSpec`
            (``mine=spec.yaml``). A file may start from a variant (``variant: norm``) and change
            some fields; ``layer`` has fields of :class:`LayerOptions`.
        seeds: one run per variant and seed.
        base: the settings of all runs.
        root: folder of the runs; a run's own folder is named after its variant and seed.

    Raises:
        ValueError: for an unknown variant, an invalid file or name, or a variant, name or seed
            that is given twice.
    """
    attentions: dict[str, dict[str, Any]] = {}
    given: dict[Variant, str] = {}
    for word in words:
        name, variant, fields = _attention(word, base.layer)
        if variant in given:
            raise ValueError(
                f"{given[variant]!r} and {word!r} are the same variant: give one of them."
            )
        if name.replace(":", "-") in {other.replace(":", "-") for other in attentions}:
            raise ValueError(f"The name {name!r} of {word!r} is already taken: choose another.")
        given[variant], attentions[name] = word, fields
    require_different(seeds)
    return [
        PlannedRun(replace(base, **fields, seed=seed), run_folder(root, name, seed))
        for seed, (name, fields) in itertools.product(seeds, attentions.items())
    ]


def _attention(word: str, layer: dict[str, Any]) -> tuple[str, Variant, dict[str, Any]]:
    """The name of a variant to compare, the variant, and its part of a run's configuration.

    ``layer`` are layer options that every variant gets.
    """
    name, equals, value = word.partition("=")
    if not equals and _is_file(word):
        raise ValueError(f"The attention in {word!r} needs a name: for example mine={word}.")
    if not equals:
        return word, resolve_layer(word, layer), {"attention": word}
    found = read_variant(Path(value)) if _is_file(value) else resolve_layer(value)
    found = found._replace(options=found.options.replaced(layer))
    if not may_name(name, found):
        raise ValueError(
            f"{name!r} cannot be the name of {value!r}: a name has only letters, digits, _ and -, "
            "and is not the name of another variant."
        )
    return name, found, {"attention": found.spec.to_dict(), "layer": found.options.to_dict()}


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml", ".json")) or Path(word).is_file()


def read_variant(path: Path) -> Variant:
    """The attention in a YAML file, as :func:`compare_configs` takes it."""
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    fields = parse_yaml(path.read_bytes(), path)
    try:
        if not isinstance(fields, dict):
            raise ValueError(f"An attention's fields must be a mapping, not {fields!r}.")
        base = resolve_layer(fields.pop("variant", AttentionSpec()), fields.pop("layer", {}))
        return base._replace(spec=AttentionSpec.from_dict({**base.spec.to_dict(), **fields}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
