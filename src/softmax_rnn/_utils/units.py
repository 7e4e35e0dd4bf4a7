"""Numbers with units, for people."""

from __future__ import annotations

import math


def bytes_text(size: float) -> str:
    """A readable size: ``512 bytes``, ``16.5 KiB``, ``9.2 GiB``."""
    if size < 1024:
        return f"{size:,.0f} bytes"
    power = 1
    while power < 4 and size / 1024**power >= 1023.95:  # which would be shown as 1,024.0
        power += 1
    return f"{size / 1024**power:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def hours_text(hours: float) -> str:
    """A readable time: ``< 1 min``, ``12 min``, ``3.2 h``, ``13 h``; empty for NaN."""
    if math.isnan(hours):
        return ""
    if hours < 1:
        return "< 1 min" if 60 * hours < 1 else f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 9.95 else f"{hours:,.0f} h"


def count_text(count: float) -> str:
    """A readable number of tokens or parameters: ``1.5 M``, ``3.7 B``."""
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.1f} B"
