"""The command that started this run, and the command that resumes it."""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from utils.launch.environment import can_be_restarted, is_launched


def typed_command(arguments: Sequence[str] | None = None) -> list[str]:
    """The command that the user typed, which may be that of a launcher.

    `arguments` are those of the script.
    """
    command = launcher_command()
    if not command:
        command = [sys.executable, sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
    if len(command) > 1 and Path(command[1]).name in (
        "accelerate",
        "accelerate-launch",
        "torchrun",
    ):
        command = command[1:]
    return [_shell_name(command[0]), *command[1:]]


def launcher_command() -> list[str]:
    """The command of the launcher that started this script; empty if there is none or it has
    exited.
    """
    command = _command_of(os.getppid()) if is_launched() else []
    return command if any(Path(word).name == Path(sys.argv[0]).name for word in command) else []


def elastic_nodes() -> tuple[int, int] | None:
    """The fewest and the most machines of torchrun's --nnodes MIN:MAX; None if their number is
    fixed.
    """
    words = ["--nnodes", os.environ.get("PET_NNODES", ""), *launcher_command()]
    found = re.findall(r"--nnodes[= ](\d+):?(\d*)", " ".join(words))
    fewest, most = found[-1] if found else ("", "")
    return (int(fewest), int(most)) if most and can_be_restarted() else None


def script_command(script: str, plugin: str | None) -> list[str]:
    """The command that runs another script of this project with this plug-in, with this Python and
    from the folder of train.py.
    """
    own = Path(sys.argv[0])
    return [
        _shell_name(sys.executable),
        str(own.with_name(script)) if own.name == "train.py" else script,
        *(["--plugin", plugin] if plugin else []),
    ]


def _shell_name(program: str) -> str:
    """The name by which a shell finds a program: its own if it is on PATH, else its path."""
    name = Path(program).name
    return name if shutil.which(name) == program else program


def _command_of(process: int) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(process).cmdline()
    return []


def resume_command(command: Sequence[str], output_dir: str, run_name: str) -> str:
    """The shell command that resumes the run that `command` started."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--resume", "--run_name", "--output_dir"):
        parser.add_argument(flag)
    _, kept = parser.parse_known_args(command)
    place = ["--output_dir", output_dir] if output_dir != "runs" else []
    return shlex.join([*kept, *place, "--run_name", run_name, "--resume", "auto"])


def precision_is_chosen() -> bool:
    """Whether the user has set the precision: in the environment, or by a flag or the config file
    of the launcher.

    Accelerate's launcher exports `no` if the user has not.
    """
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION")
    command = _command_of(os.getppid())
    start = next(
        (i for i, word in enumerate(command[:3], 1) if Path(word).name.startswith("accelerate")),
        None,
    )
    if exported != "no" or start is None:
        return exported is not None
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command_parser

    flags = launch_command_parser().parse_args(
        [word for word in command[start:] if word != "launch"]
    )
    file = Path(flags.config_file or default_config_file)
    if flags.mixed_precision is not None:
        return True
    with suppress(OSError, yaml.YAMLError):
        return "mixed_precision" in (yaml.safe_load(file.read_text()) or {})
    return False


def launcher_pid() -> int | None:
    """The process ID of the launcher; None if there is no launcher, 0 if it has already exited."""
    if not is_launched():
        return None
    parent = os.getppid()
    return 0 if parent == 1 and not launcher_command() else parent
