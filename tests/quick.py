"""Which cases of a slow test `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, of which ``make test`` runs the first one alone."""
    first, *others = cases
    values = (case if isinstance(case, tuple) else (case,) for case in others)
    return [first, *(pytest.param(*value, marks=pytest.mark.slow) for value in values)]
