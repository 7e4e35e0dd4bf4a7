"""What an import loads."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import softmax_rnn

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
    loaded = loaded_after("import softmax_rnn")
    assert loaded <= loaded_after("import torch, numpy")
    assert "torch._dynamo" not in loaded


def test_a_call_does_not_load_the_compiler() -> None:
    calls = """
import torch, softmax_rnn as sr
x = torch.rand(3, 1, 1, 4, 2)
for name in ("softmax", "norm", "linear_elu"):
    sr.attention(*x, name)
sr.attention(*x, "gate", output_gate=torch.ones(1, 1, 4))"""
    assert not loaded_after(calls)


THEIRS = ("transformers", "accelerate")


def written_in(kind: type) -> set[str]:
    """The methods and attributes in the source of a class; transformers adds others as it runs."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {*functions, *(target.id for target in targets if isinstance(target, ast.Name))}


def test_no_private_name_of_transformers_or_accelerate_is_overridden_or_imported() -> None:
    """What is private may change with any of their versions."""
    names = []
    for found in pkgutil.walk_packages(softmax_rnn.__path__, "softmax_rnn."):
        if found.name.endswith(("__main__", "gpu.pair_kernels", "gpu.tiles")):
            continue
        module = importlib.import_module(found.name)
        for line in inspect.getsource(module).splitlines():
            if re.match(rf"\s*from ({'|'.join(THEIRS)})\S* import", line):
                assert not re.search(r"\b_[a-z]", line.partition("import")[2]), line
        for _, kind in inspect.getmembers(module, inspect.isclass):
            bases = [b for b in kind.__mro__[1:] if b.__module__.partition(".")[0] in THEIRS]
            if kind.__module__ == module.__name__ and bases:
                names += [
                    f"{kind.__name__}.{name}"
                    for name in written_in(kind)
                    if re.match("_(?!_)", name) and any(hasattr(base, name) for base in bases)
                ]
    assert not names


def test_other_packages_use_the_names_of_the_operation_alone() -> None:
    """Not its inside, which may change; `softmax_rnn` itself says where its names come from."""
    folder = Path(softmax_rnn.__file__).parent
    for path in folder.rglob("*.py"):
        if (folder / "ops") in path.parents or path == folder / "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("softmax_rnn.ops."), path
