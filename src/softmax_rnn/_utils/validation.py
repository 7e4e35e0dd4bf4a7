"""Validation of plain data against types, by pydantic, with our own messages."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from softmax_rnn._utils.errors import shown, unknown

# Products of two integers below 2^53, and sums of squares of numbers below 1e100, stay finite.
_LARGEST_INTEGER, _LARGEST = 2**53, 1e100

Count = Annotated[int, Field(strict=True, ge=0, lt=_LARGEST_INTEGER)]
PositiveInt = Annotated[int, Field(strict=True, ge=1, lt=_LARGEST_INTEGER)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Number = Annotated[float, Field(strict=True, gt=-_LARGEST, lt=_LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, lt=_LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, lt=_LARGEST, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
BadFiles = Literal["error", "skip"]  # what to do with the files of a corpus that cannot be read
Text = Annotated[str, Field(strict=True)]
Hash = Annotated[str, StringConstraints(strict=True, pattern="^[0-9a-f]{64}$")]


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def validated(kind: Any, data: Any, where: object = "") -> Any:
    """``data`` as an instance of ``kind``.

    Args:
        kind: a type: a ``TypedDict`` or dataclass with fields of the types above, a list of them...
        data: plain data.
        where: its origin (a file, say), for the error.

    Raises:
        ValueError: naming the first field that is missing or invalid, its rule and its value.
    """
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in first["loc"]).lstrip(".")
    prefix = f"{where}: " if str(where) else ""
    if first["type"] == "missing":
        raise ValueError(f"{prefix}{place} is missing.")
    if first["type"] == "literal_error":
        allowed = re.findall("'([^']*)'", first["ctx"]["expected"])
        raise ValueError(f"{prefix}{unknown(place, first['input'], allowed)}")
    if first["type"] == "extra_forbidden":
        raise ValueError(f"{prefix}{place} is not a known field.")
    # For example "Input should be ...", "List should have at least 1 item after validation, not 0".
    required = re.sub(r"^\w+ should ", "must ", first["msg"]).partition(" after validation")[0]
    raise ValueError(f"{prefix}{place or 'it'} {required}, not {shown(first['input'])}.")
