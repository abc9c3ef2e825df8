"""Lockstep's version, and the commit of the code that runs."""

import subprocess
from pathlib import Path

VERSION = "0.1.0"
_ROOT = Path(__file__).resolve().parent.parent


def code_commit() -> str:
    """The Git commit of this code, with "-dirty" if files were changed since; empty without Git."""
    git = ["git", "-C", str(_ROOT), "--no-optional-locks"]
    options = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], **options).stdout.strip()
        if Path(top) != _ROOT:  # a copy without its history inside another repository
            return ""
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
