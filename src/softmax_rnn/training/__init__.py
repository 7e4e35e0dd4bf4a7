"""One training run: its configuration, its folder, its loop.

``train`` is imported when it is first used (PEP 562): the command line reads a configuration
without the packages that training needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from softmax_rnn.training.config import PRESETS, RunConfig

if TYPE_CHECKING:
    from softmax_rnn.training.run import train
    from softmax_rnn.training.trainer import NonFiniteError

__all__ = ["PRESETS", "NonFiniteError", "RunConfig", "train"]
_LAZY = {"NonFiniteError": "trainer", "train": "run"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
