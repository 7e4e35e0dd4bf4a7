"""Where tests of Triton kernels run: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

_KERNELS = ("triton_kernels", "triton_chunk_kernels", "triton_state_tiles", "triton_tiles")


def forget_the_kernels() -> None:
    """The next import decides anew whether Triton compiles or interprets them."""
    for module in _KERNELS:
        sys.modules.pop(f"softmax_rnn.ops.forms.{module}", None)


def triton_device() -> Iterator[str]:
    """A GPU; where there is none the CPU, on which Triton interprets the kernels."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    tl = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, patch_tensor = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    create_dot = builder.create_dot

    def patch_index(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 makes no integer of an array of one."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter's own multiplies the bits of bfloat16 as integers."""
        factors = (
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return create_dot(self, *factors, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(interpreter, "_patch_lang_tensor", patch_index)
        patch.setattr(builder, "create_dot", dot)
        # Triton's own functions became what the environment said when it was imported.
        for module in (tl, sys.modules["triton.language.standard"]):
            for name, function in list(vars(module).items()):
                if isinstance(function, triton.runtime.JITFunction):
                    patch.setattr(module, name, triton.jit(function.fn))
        forget_the_kernels()
        yield "cpu"
    forget_the_kernels()
