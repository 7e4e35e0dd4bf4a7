"""Decorators for ``torch.compile`` that do not import the compiler: its import is slow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """Call the function once, while tracing: its result is a constant of the graph.

    As ``torch.compiler.assume_constant_result``.
    """
    # torch's decorator does nothing else.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: Function) -> Function:
    """Exclude the function from compilation: a compiled model calls it eagerly.

    As ``torch.compiler.disable``.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        return (_disabled(function) if compiling else function)(*args, **kwargs)

    return cast(Function, run)


_disabled = functools.cache(torch.compiler.disable)
