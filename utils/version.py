"""Lockstep's version, the commit of the code that runs, and which of its folders are there."""

import os
import subprocess
from functools import cache
from pathlib import Path

VERSION = "0.3.0"
_ROOT = Path(__file__).resolve().parent.parent


@cache
def code_commit() -> str:
    """The Git commit of this code, with "-dirty" if files have changed since; empty without Git."""
    command = [
        "git",
        "--no-optional-locks",
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    # a copy inside another repository
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(_ROOT.parent)}
    try:
        return subprocess.check_output(
            command, cwd=_ROOT, env=environment, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def has_package(name: str) -> bool:
    """Whether a package of this name stands beside `utils`.

    Importing it would not tell: Python also imports an empty folder.
    """
    return (_ROOT / name / "__init__.py").is_file()
