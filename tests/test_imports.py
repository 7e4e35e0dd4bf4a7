"""What an import loads."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    *("transformers", "pandas", "scipy", "rich", "psutil", "datasets", "pydantic", "yaml"),
    *("sympy", "triton", "torch._dynamo", "torch._inductor"),
)


def loaded_after(code: str) -> set[str]:
    """The modules of ``HEAVY`` in a fresh process after ``code``."""
    code = f"{code}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_torch_and_numpy_alone() -> None:
    assert loaded_after("import softmax_rnn") <= loaded_after("import torch, numpy")
    assert "torch._dynamo" not in loaded_after("import softmax_rnn")


def test_a_call_does_not_load_the_compiler() -> None:
    call = "import torch, softmax_rnn as sr; x = torch.rand(3, 1, 1, 4, 2); sr.attention(*x, '{}')"
    for name in ("softmax", "norm", "gate", "linear_elu"):
        gate = ", output_gate=torch.ones(1, 1, 4))" if name == "gate" else ")"
        assert not loaded_after(call.format(name)[:-1] + gate)
