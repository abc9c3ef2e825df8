"""Output to a closed pipe, and how a script exits."""

import atexit
import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_ended_with: int | None = None  # the exit code, once the script has ended


class _Pipe(io.FileIO):
    """A file to write; drops what is written after the reader has exited."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def guard_output() -> None:
    """Let a run continue if the program that reads its output exits, as in `train.py | head`.

    A character that the encoding lacks is printed as an escape. The streams of tests and notebooks
    are not replaced.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            pipe = io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False))
            options = stream.encoding, "backslashreplace"
            setattr(sys, name, io.TextIOWrapper(pipe, *options, line_buffering=True))


def exit_with(code: int) -> NoReturn:
    """End the script with this exit code, after its other threads and exit handlers."""
    global _ended_with
    _ended_with = code
    raise SystemExit(code)


def hard_exit(code: int) -> None:
    """From now on, the process ends with this exit code as soon as its exit handlers begin."""
    global _ended_with
    _ended_with = code
    atexit.register(end_quickly)


def end_quickly() -> None:
    """If the exit code is known, end without Python's clean-up, which takes about a second."""
    if _ended_with is not None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):  # a full disk must not change the exit code
                stream.flush()
        os._exit(_ended_with)


def refuse_windows() -> NoReturn:
    """Exit with code 2; one process of each machine prints why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        program = Path(sys.argv[0]).name
        sys.stderr.write(f"{program}: error: Lockstep needs Linux; on Windows use WSL 2\n")
    raise SystemExit(2)
