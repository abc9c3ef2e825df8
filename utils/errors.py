"""From an exception to one line that names the thing and the fix, on one rank, and to an exit code."""

import re

USER_ERRORS = (ValueError, OSError, ImportError)  # what names a cause outside this code; anything else is a bug


class AgreedError(ValueError):
    """An error of one rank that every rank raises alike, so that they may also go on together."""


class LostRank(ValueError):
    """A collective failed because another process of the run is gone."""


def one_line(error: BaseException) -> str:
    """The error's text on one line; for an OSError the file that it is about comes first."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because a peer left, hangs or cannot be reached (gloo's and NCCL's wordings)."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    signs = ("closed by peer", "connection reset", "broken pipe", "timed out", "connectfullmesh", "socket closed")
    signs += ("ncclremoteerror", "nccl communicator was aborted")
    return any(sign in text for sign in signs)


def lost_rank_text(error: BaseException, place: str = "", waited_for: str = "") -> str:
    """What a failed collective means: where it was, for whom this rank waited there, as far as that is known."""
    what = re.sub(r"^\[\S+\] ", "", one_line(error)).split(". ")[0]  # gloo puts its source file first
    where = f", at: {place}; waited for {waited_for}" if waited_for else f", at: {place}" if place else ""
    return (
        f"another process of this run left or stopped answering ({what[:160]}){where}; its own message says why, "
        "unless it was killed, as for memory"
    )
