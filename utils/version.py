"""Lockstep's version, and the commit of the code that runs."""

import subprocess
from pathlib import Path

VERSION = "0.1.0"
_ROOT = Path(__file__).resolve().parent.parent


def code_commit() -> str:
    """The Git commit of this code, with "-dirty" if files have changed since; empty without Git."""
    try:
        if Path(_git("rev-parse", "--show-toplevel")) != _ROOT:  # a copy inside another repository
            return ""
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), "--no-optional-locks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
