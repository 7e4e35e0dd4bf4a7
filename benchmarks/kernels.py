"""What the compiler says of the Triton kernels of the chunked form, without a GPU.

    python -m benchmarks.kernels --capability 80 90 --dtype bfloat16 float32 --width 64 128

prints a table of registers per thread, bytes that a thread spills to memory, and shared memory. It
times nothing.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import tempfile
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from softmax_rnn import AttentionSpec
from softmax_rnn.ops.forms.chunks.columns import Columns
from softmax_rnn.ops.forms.gpu import chunks as triton_chunks

HEADER = "| kernel | gradient | capability | dtype | width | registers | spilled | shared KiB |"
KERNELS = ("add_states", "scan_states", "chunk_sums", "chunk_query_grads", "chunk_key_grads")


class _Compiled:
    """In place of a kernel: compiles it instead of running it."""

    def __init__(
        self, name: str, kernel: Any, note: list[Any], rows: list[tuple[Any, ...]]
    ) -> None:
        self.name, self.kernel, self.note, self.rows = name, kernel, note, rows
        self.arg_names = kernel.arg_names

    def __getitem__(self, _: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self.kernel.warmup(*arguments, grid=(1,), **options)
            gradient = ""
            if self.name == "chunk_key_grads":
                gradient = "values" if arguments[self.arg_names.index("dk")] is None else "keys"
            usage = _usage(compiled.asm["ptx"])
            self.rows.append((self.name, gradient, *self.note, *usage, compiled.metadata.shared))

        return launch


class _Driver:
    """In place of that of a GPU, which need not be here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by the device

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def _usage(ptx: str) -> tuple[int, int]:
    """Registers per thread, and bytes of spills."""
    ptxas = importlib.import_module("triton.knobs").nvidia.ptxas.path
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", "--gpu-name", target[1], file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spills is not None
    return int(registers[1]), int(spills[1])


def compile_all(capabilities: list[int], dtypes: list[str], widths: list[int]) -> list[Any]:
    """A row for each kernel of both passes: a Taylor series of order 2 with decays."""
    kernels = importlib.import_module("softmax_rnn.ops.forms.gpu.chunk_kernels")
    rows: list[tuple[Any, ...]] = []
    note: list[Any] = []
    for name in KERNELS:
        setattr(kernels, name, _Compiled(name, getattr(kernels, name), note, rows))
    spec = AttentionSpec(series="taylor", order=2, decay="token")
    for capability in capabilities:
        driver.set_active(_Driver(capability))
        for dtype in dtypes:
            for width in widths:
                note[:] = capability, dtype, width
                q, k = torch.zeros(1, 2, 70, width).movedim(-1, 1), torch.zeros(1, 70, width).mT
                v, decay = torch.zeros(1, 70, width + 1).mT, torch.zeros(1, 1, 70).double()
                inputs = Columns(q, k, v, None, decay, None)
                products = triton_chunks.product_type(getattr(torch, dtype))
                chunks = triton_chunks.ChunkKernels(spec, 0.1, products, True, 64, False)
                out = torch.zeros(1, 2, 70, width + 1).movedim(-1, 1)
                kept, empty = (
                    q.new_empty(triton_chunks.states_shape(inputs, chunks)),
                    q.new_empty(0),
                )
                triton_chunks.sums(inputs, chunks, out, empty, kept)
                grads = inputs._replace(
                    **{n: torch.empty_like(x) for n, x in inputs._asdict().items() if x is not None}
                )
                triton_chunks.gradients(inputs, chunks, kept, out, None, grads, True)
    return list(dict.fromkeys(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    given = parser.parse_args()
    print(HEADER)
    print("| --- | --- |" + " ---: |" * 6)
    for *row, shared in compile_all(given.capability, given.dtype, given.width):
        print("|", *(f"{x} |" for x in row), f"{shared / 1024:.0f} |")


if __name__ == "__main__":
    main()
