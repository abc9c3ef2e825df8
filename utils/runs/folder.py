"""The folder of a run: find it, create it, and lock it.

What a start resumes from (`CheckpointManager.newest`):
1. after a restart by the launcher, the newest good checkpoint of this run's folder, if it has one;
2. with --resume auto, the newest good checkpoint of the folder --run_name, if it has one;
3. with --resume PATH, that checkpoint, or the newest good one of that run;
4. else nothing: a new run, whose folder must not exist.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files import LOCK, expand, lock
from utils.launch.environment import can_be_restarted
from utils.runs.manifest import find_checkpoint

_ORPHANS_EXIT_WITHIN = 20.0  # seconds: ranks whose launcher was killed finish their update and save


def lock_folder(folder: Path) -> TextIO:
    """Create the folder of a run if it is missing, and lock it until the returned file is closed."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return lock(folder, _ORPHANS_EXIT_WITHIN)


def check_own(folder: Path, locked: TextIO) -> None:
    """Raise OSError if the folder was deleted, or now belongs to another run."""
    if not (folder / "checkpoints").is_dir():  # not created again: its disk may be unmounted for a while
        raise FileNotFoundError(f"{folder / 'checkpoints'} no longer exists")
    with suppress(FileNotFoundError):
        if (folder / LOCK).stat().st_ino != os.fstat(locked.fileno()).st_ino:
            raise OSError(f"{folder} was deleted and now belongs to another run")


def check_run_folder(config: TrainConfig, connected: bool = False) -> None:
    """Raise ValueError or OSError if the run folder is taken or cannot be created, or the checkpoint does not exist.

    After a restart by the launcher, an existing folder may be that of this run, so the check waits until the processes
    have connected (`connected`). A launcher does not count restarts that the launcher of another machine began.
    """
    if can_be_restarted() and not connected:
        return
    folder, parent = named_folder(config), expand(config.output_dir)
    if config.resume not in (None, "auto"):
        path = expand(config.resume)
        find_checkpoint(path, prefer=("latest",))
        if config.run_name and folder.exists() and folder.resolve() not in (path.resolve(), *path.resolve().parents):
            raise UserError(f"{folder} exists and is not the run of {config.resume}", "choose another --run_name")
    if config.run_name and config.resume is None and folder.exists():
        raise UserError(f"{folder} exists", "continue it with --resume auto, or choose another --run_name")
    existing = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(f"--output_dir {parent}: {existing} is not a folder", "choose another --output_dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir {parent}: {existing} is not writable", "choose another --output_dir")


def named_folder(config: TrainConfig) -> Path:
    """The folder of --run_name; without a name, the folder of all runs."""
    return expand(config.output_dir) / (config.run_name or "")


def create_folder(config: TrainConfig) -> Path:
    """Create a new folder for the run and return its path."""
    about = re.sub(r"[^\w.]+", "-", f"{Path(config.data).name}-{config.model}").lstrip(".-")
    name = config.run_name or f"{about[:50]}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 100):
        path = expand(config.output_dir) / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another run started in the same second, or created this name after the check
            if config.run_name:
                raise
    raise UserError(f"{path} and the names before it exist", "choose a --run_name")


def check_shared(folder: Path, holder: str) -> None:
    """Raise ValueError if this rank does not see the folder that the main process, `holder`, has locked."""
    for _ in range(20):  # a network file system may show a new file with a delay
        with suppress(OSError):
            if (folder / LOCK).read_text() == holder:
                return
        time.sleep(0.25)
    problem = f"{folder} is not the folder that rank 0 has created"
    raise UserError(problem, "choose an --output_dir that all machines share")
