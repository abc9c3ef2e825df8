"""Keep a run alive if its output cannot be printed: closed descriptors, broken pipes, full disks,
limited encodings.

Import this module before any other. If descriptor 1 is closed, the next file or socket that is
opened becomes standard output, and printed text, including that of C++ code, is written to it. On a
system without POSIX file locks, such as Windows, the import exits with one line and code 2, because
later imports would fail with a traceback.
"""

import atexit
import io
import os
import re
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_CONTROLS = re.compile(rb"[\0-\b\v\f\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")  # but tabs and ends of lines
_ended_with: int | None = None  # the exit code, once the script has ended


def guard_output() -> None:
    """Replace sys.stdout and sys.stderr with streams to the same place that never raise.

    A character that the encoding lacks is printed as an escape. Output that cannot be written is
    dropped. On stdout, a control character becomes a question mark, because an untrusted file may
    contain it. The streams of tests and notebooks, which are not plain text files, are not
    replaced.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and not isinstance(stream.buffer, _Guarded):
            with suppress(OSError, ValueError):
                stream.flush()
            with suppress(ValueError):  # a stream that is not a file
                guarded = _Guarded(stream.fileno(), "w", closefd=False)
                guarded.is_plain = name == "stdout"
                guarded.stream = stream
                options = stream.encoding, "backslashreplace"
                setattr(sys, name, io.TextIOWrapper(guarded, *options, line_buffering=True))


def exit_with(code: int) -> NoReturn:
    """End the script with this exit code, after its other threads and exit handlers."""
    global _ended_with
    _ended_with = code
    raise SystemExit(code)


def hard_exit(code: int) -> None:
    """From now on, the process ends with this exit code as soon as its exit handlers begin."""
    global _ended_with
    _ended_with = code
    atexit.register(_end)


def _end() -> None:
    """End without Python's final clean-up, which takes about a second, if the exit code is known."""
    if _ended_with is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ended_with)


class _Guarded(io.FileIO):
    """Writes all bytes to a file, or drops them if that fails."""

    is_plain = False  # whether control characters are replaced
    stream: Any = None  # kept, because deleting it would close its file

    def write(self, data) -> int:
        rest = memoryview(_CONTROLS.sub(b"?", data) if self.is_plain else data)
        with suppress(OSError, ValueError):  # ValueError: the file was closed
            while rest:
                written = super().write(rest)
                if written is None:  # another program has made the pipe non-blocking
                    select.select([], [self], [])
                else:
                    rest = rest[written:]
        return len(data)


def _open_what_is_closed() -> None:
    """Open /dev/null for each closed descriptor among 0, 1 and 2, and set the streams that Python
    lacks.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # the system assigns the lowest free number, which is `descriptor`
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _check_system() -> None:
    """Exit with code 2 if POSIX file locks are missing, as on Windows; one process per machine
    prints why.
    """
    try:
        import fcntl  # noqa: F401
    except ImportError:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(
                f"{Path(sys.argv[0]).name}: error: Lockstep needs Linux; on Windows use WSL 2\n"
            )
        raise SystemExit(2) from None


def _is_own_script() -> bool:
    """Whether this process runs a script of Lockstep, and not a notebook or a test that imports
    one.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    return (
        script is not None and Path(script).resolve().parent == Path(__file__).resolve().parents[1]
    )


_open_what_is_closed()
_check_system()
if _is_own_script():
    atexit.register(_end)  # the first handler that is registered is the last one that is called
