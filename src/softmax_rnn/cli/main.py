"""Parse the command line, run the command, and turn its result into an exit code."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from torch import OutOfMemoryError

from softmax_rnn._utils.errors import ExitCode
from softmax_rnn._utils.files import UNUSABLE
from softmax_rnn.cli.extras import OF_TRAIN, install_hint
from softmax_rnn.training.stopping import RunStopped, StopRequest


def process() -> NoReturn:
    """Run the command line of this process, and end the process with its exit code."""
    StopRequest.ends_process = True
    code = main()
    if code == ExitCode.STOPPED or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # End without the interpreter's shutdown. During it a second signal would replace the exit
        # code, and a gloo thread that frees a tensor would abort the process.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its :class:`ExitCode`."""
    if not faulthandler.is_enabled():
        faulthandler.enable()  # truncating a memory-mapped file ends the process with SIGBUS
    words = list(sys.argv[1:] if arguments is None else arguments)
    first = words[0] if words else "--help"
    name = "softmax-rnn"
    in_words: Callable[[str], str] = str  # replaced when the options of the command are known
    extra = "train" if first.startswith("-") or first in OF_TRAIN else "report"
    try:
        from softmax_rnn.cli.parser import COMMANDS, parse, with_flags

        in_words = partial(with_flags, words)
        command, options = parse(words)
        name, extra = f"softmax-rnn {command}", COMMANDS[command].extra
        return COMMANDS[command].run(options)
    except ModuleNotFoundError as error:
        if (hint := install_hint(error, name, extra)) is None:
            raise
        return _failed(ExitCode.WRONG_INPUT, hint)
    except (ValueError, FileNotFoundError) as error:
        return _failed(ExitCode.WRONG_INPUT, in_words(str(error)))
    except OSError as error:
        wrong_path = error.errno in UNUSABLE
        return _failed(ExitCode.WRONG_INPUT if wrong_path else ExitCode.FAILED, error)
    except (OverflowError, FloatingPointError, MemoryError, OutOfMemoryError) as error:
        return _failed(ExitCode.FAILED, f"{type(error).__name__}: {error}")
    except (ArithmeticError, RuntimeError) as error:
        if not _is_expected(error):
            raise
        return _failed(ExitCode.FAILED, in_words(str(error)))
    except RunStopped as stopped:
        return _stopped(ExitCode.STOPPED, str(stopped), words, stopped)
    except KeyboardInterrupt as stopped:
        return _stopped(ExitCode.INTERRUPTED, "stopped", words, stopped)


def _is_expected(error: Exception) -> bool:
    """Whether the message is enough; any other error is a bug and needs its traceback."""
    from softmax_rnn.experiments.scheduler import RunsFailedError
    from softmax_rnn.training import NonFiniteError

    if isinstance(error, NonFiniteError | RunsFailedError):
        return True
    return "can't allocate memory" in str(error)  # torch has no error class for this on a CPU


def _failed(code: ExitCode, message: object) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _stopped(code: ExitCode, message: str, words: Sequence[str], stopped: BaseException) -> int:
    resume = " with --resume" if words[0] == "train" and "--resume" not in words else ""
    what_next = f"rerun the same command{resume} to resume"
    if notes := getattr(stopped, "__notes__", None):  # a corpus was being prepared
        what_next = f"{'; '.join(notes)}: rerun the same command to start again"
    print(f"{message}; {what_next}", file=sys.stderr)
    return code
