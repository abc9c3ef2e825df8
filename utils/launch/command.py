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

_LAUNCHERS = ("accelerate", "torchrun", "torch.distributed.run")  # also accelerate-launch


def typed_command(arguments: Sequence[str] | None = None) -> list[str]:
    """The command that starts this script, without the launcher's own options.

    `arguments` are those of the script.
    """
    program = _launcher_program() or [_shell_name(Path(sys.executable))]
    return [*program, sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]


def _launcher_program() -> list[str]:
    """The words that call torchrun or Accelerate's launcher, if it started this script: the
    program, or Python with -m and a module, and `launch`.
    """
    words = launcher_words()
    for place, word in enumerate(words[:3]):
        if Path(word).name.startswith(_LAUNCHERS):
            first = 0 if "-m" in words[:place] else place
            end = place + 1
            if words[end : end + 1] == ["launch"]:
                end += 1
            return [_shell_name(Path(words[first])), *words[first + 1 : end]]
    return []


def resume_command(command: Sequence[str], output_dir: str, run_name: str) -> str:
    """The shell command that resumes the run that `command` started."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--resume", "--run_name", "--output_dir", "--stop_after"):
        parser.add_argument(flag)
    _, kept = parser.parse_known_args(command)
    if output_dir != "runs":
        kept += ["--output_dir", output_dir]
    return shlex.join([*kept, "--run_name", run_name, "--resume", "auto"])


def script_command(script: str, plugin: str | None) -> list[str]:
    """The command that runs another script of this project with this plug-in, with this Python and
    from the folder of train.py.
    """
    own = Path(sys.argv[0])
    if own.name == "train.py":
        script = str(own.with_name(script))
    command = [_shell_name(Path(sys.executable)), script]
    if plugin:
        command += ["--plugin", plugin]
    return command


def _shell_name(program: Path) -> str:
    """The name by which a shell finds a program: its own if it is on PATH, else its path."""
    return program.name if shutil.which(program.name) == str(program) else str(program)


def launcher_words() -> list[str]:
    """The command of the launcher that started this script, up to the script; empty if there is no
    launcher or it has exited.
    """
    words = _parent_words()
    names = [Path(word).name for word in words]
    script = Path(sys.argv[0])
    for name in (script.name, script.stem):  # the launcher's -m has the module
        if name in names:
            return words[: names.index(name)]
    return []


def _parent_words() -> list[str]:
    """The command of the process that started this one; empty if there is no launcher."""
    if is_launched():
        with suppress(psutil.Error):
            return psutil.Process(os.getppid()).cmdline()
    return []


def _by_accelerate() -> bool:
    """Whether the launcher is `accelerate launch` or accelerate-launch."""
    return any(Path(word).name.startswith("accelerate") for word in _parent_words()[:3])


def _launcher_option(name: str) -> str:
    """The value of an option in the launcher's command; empty if it is not there."""
    pattern = f"^--{name.replace('_', '[-_]')}[=\n](.+)$"
    found = re.findall(pattern, "\n".join(launcher_words()), re.MULTILINE)
    return found[-1] if found else ""


def is_elastic() -> bool:
    """Whether machines may join and leave this run: torchrun's --nnodes MIN:MAX."""
    nodes = _launcher_option("nnodes") or os.environ.get("PET_NNODES", "")
    return ":" in nodes and can_be_restarted()


def precision_is_chosen() -> bool:
    """Whether the user has set the precision: in the environment, or by a flag or the config file
    of the launcher.

    Accelerate's launcher exports `no` if the user has not.
    """
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if exported != "no" or not _by_accelerate():
        return exported is not None
    if _launcher_option("mixed_precision"):
        return True
    from accelerate.commands.config.config_args import default_config_file

    file = Path(_launcher_option("config_file") or default_config_file)
    with suppress(OSError, yaml.YAMLError):
        return "mixed_precision" in (yaml.safe_load(file.read_text()) or {})
    return False


def launcher_pid() -> int | None:
    """The process ID of the launcher; None if there is no launcher, 0 if it has already exited."""
    if not is_launched():
        return None
    parent = os.getppid()
    return 0 if parent == 1 and not launcher_words() else parent
