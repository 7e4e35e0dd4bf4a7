"""What the tests of forms share."""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_cases import forget_the_kernels

from softmax_rnn.ops.forms.cpu import cpp


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """A GPU; where there is none the CPU, on which Triton interprets the kernels."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    triton, tl = (pytest.importorskip(f"triton{name}") for name in ("", ".language"))
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, patch_tensor = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    create_dot, patch_lang = builder.create_dot, interpreter._patch_lang
    numpy_type, options = interpreter._get_np_dtype, interpreter.interpreter_builder.options
    once = functools.cache(numpy_type)
    scopes: dict[str, Any] = {}

    def patch_once(function: Any) -> Any:
        """The interpreter does it again for every call of a function, which takes most of it."""
        if function.__module__ not in scopes:
            scopes[function.__module__] = patch_lang(function)
        return interpreter._LangPatchScope()

    def patch_index(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 makes no integer of an array of one."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())

    def of_numpy(dtype: Any) -> Any:
        """The interpreter's own builds a table of all types for every call."""
        return numpy_type(dtype) if dtype.scalar.is_ptr() else once(dtype.scalar)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter's own multiplies the bits of bfloat16 as integers."""
        factors = (
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return create_dot(self, *factors, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(interpreter, "_patch_lang_tensor", patch_index)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(builder, "create_dot", dot)
        patch.setattr(interpreter, "_get_np_dtype", of_numpy)
        # What it works out of too large integers is for an assertion that only `debug` turns on.
        assert not options.debug
        quick = dataclasses.replace(options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", quick)
        # Triton's own functions became what the environment said when it was imported.
        for module in (tl, sys.modules["triton.language.standard"]):
            for name, function in list(vars(module).items()):
                if isinstance(function, triton.runtime.JITFunction):
                    patch.setattr(module, name, triton.jit(function.fn))
        forget_the_kernels()
        yield "cpu"
        for scope in reversed(scopes.values()):
            scope.restore()
    forget_the_kernels()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """A process that has built nothing, and an empty cache; the function makes another one."""
    monkeypatch.setenv("SOFTMAX_RNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(cpp.VARIABLE, raising=False)
    monkeypatch.setattr(cpp, "_failures", [])
    for name in ("_loaded", "_compiler"):  # what this process has built is not lost
        own = functools.cache(getattr(cpp, name).__wrapped__)
        monkeypatch.setattr(cpp, name, own)

    def forget() -> None:
        cpp._failures.clear()
        cpp._loaded.cache_clear()
        cpp._compiler.cache_clear()

    return forget


@pytest.fixture
def tiny(fresh: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library of one function takes the place of the whole one, which takes 4 s to build."""
    source = tmp_path / "native.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(cpp, "SOURCES", [source])
    monkeypatch.setattr(cpp, "HEADERS", [])
    return source


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files, which is empty."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
