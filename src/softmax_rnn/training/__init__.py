"""One training run: its configuration, its folder, its loop.

The names are imported on first use (PEP 562), so that each part of this package needs only its own
dependencies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmax_rnn.training.config import PRESETS, RunConfig
    from softmax_rnn.training.loop import NonFiniteError
    from softmax_rnn.training.run import train

__all__ = ["PRESETS", "NonFiniteError", "RunConfig", "train"]
_MODULES = {"PRESETS": "config", "NonFiniteError": "loop", "RunConfig": "config", "train": "run"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
