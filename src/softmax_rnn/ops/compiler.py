"""Decorators for ``torch.compile`` that do not import the compiler: its import is slow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, cast, overload

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


Value = TypeVar("Value")


class fact(Generic[Value]):  # noqa: N801 - a decorator, as property is
    """A property of frozen data that :func:`keep_facts` computes once, when the data is made.

    Every call asks a spec several times. ``functools.cached_property`` would do, but torch.compile
    cannot trace it. While tracing nothing is kept: a graph must not depend on earlier questions.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    @overload
    def __get__(self, data: None, owner: type) -> Self: ...

    @overload
    def __get__(self, data: object, owner: type) -> Value: ...

    def __get__(self, data: object | None, owner: type) -> Self | Value:
        return self if data is None else self.function(data)


def keep_facts(data: object) -> None:
    """Compute the facts of an object, in their order: later ones ask earlier ones."""
    if not torch.compiler.is_compiling():
        for kind in reversed(type(data).__mro__):
            for name, value in vars(kind).items():
                if isinstance(value, fact):
                    data.__dict__[name] = value.function(data)
