"""Error messages for a user's mistakes: what was given, what is allowed, the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, value: object, allowed: Iterable[str]) -> ValueError:
    """The error for a ``value`` outside the closed set ``allowed``."""
    names = list(allowed)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"Unknown {what} {value!r}.{hint} Allowed: {', '.join(names)}.")


def require_choice(what: str, value: object, allowed: Iterable[str]) -> None:
    """Raise :func:`unknown` unless ``value`` is one of ``allowed``."""
    names = list(allowed)
    if value not in names:
        raise unknown(what, value, names)
