"""``compile: auto``: whether a run goes through ``torch.compile``, from a few measured steps.

Compiling costs half a minute or more on a CPU, and the compiled model is not always the faster one.
So a run that is long enough compiles, times both ways in turns, and keeps the faster one. The
decision is written in the run's folder, for a resumed run repeats it, and in the cache, for runs
that differ in the seed alone. Neither way changes more than rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

from softmax_rnn._utils.files import read_small_json, write_json
from softmax_rnn._utils.machine import cache_folder, processor
from softmax_rnn._utils.progress import notice
from softmax_rnn.training.config import TrainingConfig

if TYPE_CHECKING:
    from softmax_rnn.training.loop import Loop

FILE = "compiled.json"
# Seconds of eager steps below which nothing is compiled: it could not gain more than it costs.
SHORTEST = 300.0
_WARM_UP, _ROUNDS = 2, 5
_PAYS = 0.97  # compiled over eager, at most
_NEUTRAL = ("seed", "steps", "schedule_steps", "warmup_steps", "tensorboard", "wandb")


class Decision(NamedTuple):
    """What was measured, in seconds; ``None`` for what was not."""

    compiled: bool
    why: str
    eager: float | None = None
    fast: float | None = None
    compiling: float | None = None


@contextlib.contextmanager
def chosen(loop: Loop) -> Iterator[None]:
    """Run a loop's steps compiled or not, as its configuration says."""
    config = loop.config
    if config.compile != "auto":
        yield
        return
    decision = _decided(loop)
    if loop.accelerator.is_main_process:
        write_json(loop.folder.path / FILE, decision._asdict())
        notice(f"compile=auto: {decision.why}.")
    with contextlib.nullcontext() if decision.compiled else _eager():
        yield


def _eager() -> contextlib.AbstractContextManager[None]:
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _decided(loop: Loop) -> Decision:
    """The decision of an earlier session or of a like run, or a new one; of the first process."""
    known: list[Decision | None] = [None]
    if loop.accelerator.is_main_process:
        known = [_read(lambda: loop.folder.path / FILE) or _read(lambda: _cache(loop.config))]
    if (found := broadcast_object_list(known)[0]) is not None:
        return Decision(*found)
    decision = broadcast_object_list([_measured(loop)])[0]
    if loop.accelerator.is_main_process and decision.fast is not None:
        with contextlib.suppress(OSError):  # other runs will measure for themselves
            cached = _cache(loop.config)
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_json(cached, decision._asdict())
    return Decision(*decision)


def _measured(loop: Loop) -> Decision:
    """Time steps without updates; all processes of a run do so together."""
    if not loop.compiles:
        return Decision(False, "not compiled, as conversions and context parallelism never are")
    loop.model.train()
    with _eager():
        eager = median(_seconds(loop) for _ in range(_WARM_UP + _ROUNDS))
    left = (loop.last_step - loop.step) * eager
    if left < SHORTEST:
        return Decision(False, f"not compiled, as the {left:.0f} s of steps are too few", eager)
    if loop.accelerator.is_main_process:
        notice("compile=auto: compiling, to time steps both ways; this may take a minute or two.")
    start = time.perf_counter()
    try:
        for _ in range(_WARM_UP):
            _seconds(loop)
    except Exception as error:  # any compiler's: the run itself does not need it
        if loop.accelerator.num_processes > 1:
            raise
        reason = " ".join(str(error).split())[:300]
        why = f"not compiled, which fails ({type(error).__name__}: {reason})"
        return Decision(False, why, eager)
    compiling = time.perf_counter() - start
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_ROUNDS):
        times[True].append(_seconds(loop))
        with _eager():
            times[False].append(_seconds(loop))
    fast, eager = median(times[True]), median(times[False])
    pays = fast <= _PAYS * eager
    why = (
        f"{'compiled' if pays else 'not compiled'}: a step takes {1e3 * fast:.1f} ms compiled and "
        f"{1e3 * eager:.1f} ms not (compiling took {compiling:.0f} s)"
    )
    return Decision(pays, why, eager, fast, compiling)


def _seconds(loop: Loop) -> float:
    """The time of the next step's gradients, which are then dropped."""
    start = time.perf_counter()
    loop.gradients()
    loop.optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _cache(config: TrainingConfig) -> Path:
    fields = {name: x for name, x in config.to_dict().items() if name not in _NEUTRAL}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = (processor(), gpus, torch.get_num_threads(), torch.__version__)
    key = hashlib.sha256(repr((fields, machine)).encode()).hexdigest()[:16]
    return cache_folder() / "compiled" / f"{key}.json"


def _read(path: Callable[[], Path]) -> Decision | None:
    try:
        return Decision(**read_small_json(path()))
    except (OSError, ValueError, TypeError):
        return None
