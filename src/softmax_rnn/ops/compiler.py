"""Marks for ``torch.compile`` that do not import the compiler, which is slow to import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``: traced once, its result is part of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # all that torch does
    return function


def uncompiled(function: Function) -> Function:
    """``torch.compiler.disable``: a compiled model calls the function as it is."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        return (_disabled(function) if compiling else function)(*args, **kwargs)

    return cast(Function, run)


_disabled = functools.cache(torch.compiler.disable)
