"""Errors that are reported to the user in one line: what is wrong, then the fix."""

import re
from collections.abc import Sequence

# parts of the messages of gloo and NCCL
_LOST_RANK = (
    "closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "connectfullmesh",
    "socket closed",
    "likely closed",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "nccl operation failed",
    "remote process exited",
    "unhandled system error",
)
# caused by the input or the system; any other error is a bug
USER_ERRORS = (ValueError, OSError, ImportError)


class UserError(ValueError):
    """A problem that the user can fix. It is printed on one line: `problem`, then `fix`."""

    def __init__(self, problem: str, fix: str = ""):
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}" if self.fix else self.problem


class AgreedError(UserError):
    """An error of one rank that is raised on all ranks.

    The ranks are still in step, so they can continue.
    """


class InUse(UserError):
    """Another process uses a folder. It may end, so a later attempt may succeed."""


class LostRank(UserError):
    """A collective failed because another process of the run has exited or does not answer."""


def shorten(text: str, most: int = 60) -> str:
    """The text, without its middle if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def printable(name: str) -> str:
    """The name on one line.

    Characters that cannot be seen, such as a zero-width space, become their code points.
    """
    text = " ".join(name.split())
    return "".join(char if char.isprintable() else f"<U+{ord(char):04X}>" for char in text)


def alternatives(words: Sequence[str]) -> str:
    """The words as in "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def counted(number: int, noun: str) -> str:
    """The number and the noun, as in "1 GPU" or "2 GPUs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(error: BaseException) -> str:
    """The error's text on one line, see `printable`; for an OSError the name of the file comes
    first.
    """
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return printable(str(error)) or type(error).__name__


def split_error(error: BaseException) -> tuple[str, str]:
    """What is wrong, and how to fix it (empty if the error has no fix), each on one line."""
    parts = (error.problem, error.fix) if isinstance(error, UserError) else (one_line(error), "")
    problem, fix = (" ".join(part.split()) for part in parts)
    return problem, fix


def is_lost_rank(error: BaseException) -> bool:
    """Whether gloo or NCCL reports that a peer has exited, hangs or cannot be reached."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _LOST_RANK)


def as_lost_rank(error: BaseException, place: str, waited_for: str) -> BaseException:
    """A `LostRank` with the place of this rank and the rank that it waited for, if known; other
    errors unchanged.
    """
    if not is_lost_rank(error):
        return error
    # gloo puts its source file first
    what = re.sub(r"^\[\S+\] ", "", one_line(error)).split(". ")[0]
    problem = f"another process of this run exited or stopped answering ({what[:160]})"
    if place:
        problem += f", at: {place}"
    if waited_for:
        problem += f"; waited for {waited_for}"
    return LostRank(problem, "read its output; if there is none, it was killed (out of memory?)")
