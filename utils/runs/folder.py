"""The folder of a run: its name, whether it may be created, and what a start continues.

What a start resumes from (`find_start`):
1. after a restart by the launcher, the newest good checkpoint of this run's folder, if it has one;
2. with --resume auto, the newest good checkpoint of the folder --run_name, if it has one;
   in both cases, if it has none, the checkpoint that resumed_from.txt names, if the folder has this
   file;
3. with --resume PATH, that checkpoint, or the newest good one of that run;
4. else nothing: a new run, whose folder must not exist.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from utils.config import require
from utils.errors import UserError
from utils.files import LOCK, check_output_folder, expand, read_text
from utils.launch import can_be_restarted
from utils.runs.log import check_log
from utils.runs.manifest import ORIGIN, find_checkpoint, newest_good, verify
from utils.runs.metadata import read_settings
from utils.settings.runs import RunSettings
from utils.settings.train import TrainConfig


def find_start(
    config: RunSettings, stored: Callable[[str], str], take: Callable[[Path], Path]
) -> tuple[Path | None, Path | None, TrainConfig | None]:
    """The folder of the run if it exists, the checkpoint to start from, and the settings of a run
    that was killed before its first checkpoint; each may be None. On the main process.

    `stored` returns what an earlier attempt of the launcher has stored; `take` locks the folder.
    """
    checkpoint = None
    begun = None
    before = stored(f"run-folder-{config.run_name}")
    path = Path(before) if before else None
    if path is None:
        check_run_folder(config, connected=True)
        named = named_folder(config)
        if config.run_name and config.resume and (config.resume == "auto" or named.exists()):
            path = named
    if path is not None:
        if not path.exists():
            print(f"{path} does not exist; starting a new run")
        take(path)
        if config.resume == "auto" or (before and stored(f"started-{config.run_name}")):
            checkpoint = newest_good(path)
            if checkpoint is None:
                checkpoint, begun = origin_of_run(path)
    if checkpoint is None and config.resume not in (None, "auto"):
        named = expand(config.resume)
        checkpoint = newest_good(named)
        if checkpoint is None:
            checkpoint = find_checkpoint(named)
            verify(checkpoint)
    if begun:
        start = checkpoint or "the beginning"
        print(
            f"{path} has no checkpoint; starting from {start}, with the settings of its config.yaml"
        )
    return path, checkpoint, begun


def origin_of_run(folder: Path) -> tuple[Path | None, TrainConfig | None]:
    """The checkpoint of another run that a run without checkpoints started from, and the settings
    of the run; None for each that it has not written.
    """
    origin = folder / ORIGIN
    settings = folder / "config.yaml"
    if (folder / "log.jsonl").exists():
        check_log(folder)
    try:
        checkpoint = None
        if origin.exists():
            checkpoint = Path(read_text(origin, 8192))
            verify(checkpoint)
        return checkpoint, read_settings(folder) if settings.exists() else None
    except UserError as error:  # its fix is for another checkpoint or a --config file
        raise UserError(error.problem, "start a new run with another --run_name") from None


def check_own(folder: Path, locked: TextIO) -> None:
    """Raise OSError if the folder was deleted, or now belongs to another run."""
    # not created again: its disk may be unmounted for a while
    if not (folder / "checkpoints").is_dir():
        raise FileNotFoundError(f"{folder / 'checkpoints'} no longer exists")
    with suppress(FileNotFoundError):
        if (folder / LOCK).stat().st_ino != os.fstat(locked.fileno()).st_ino:
            raise OSError(f"{folder} was deleted and now belongs to another run")


def check_run_folder(config: RunSettings, connected: bool = False) -> None:
    """Raise ValueError or OSError if the run folder is taken or cannot be created, or the
    checkpoint does not exist.

    After a restart by the launcher, an existing folder may be that of this run, so the check waits
    until the processes have connected (`connected`). A launcher does not count restarts that the
    launcher of another machine began.
    """
    if can_be_restarted() and not connected:
        return
    folder = named_folder(config)
    resume = config.resume
    path = expand(resume).resolve() if resume not in (None, "auto") else None
    if path:
        find_checkpoint(path)
    if config.run_name and resume != "auto" and folder.exists():
        is_own = path is not None and folder.resolve() in (path, *path.parents)
        fix = "continue it with --resume auto, or choose another --run_name"
        require(is_own, f"{folder} exists", fix)
    check_output_folder("--output_dir", expand(config.output_dir))


def named_folder(config: RunSettings) -> Path:
    """The folder of --run_name; without a name, the folder of all runs."""
    return expand(config.output_dir) / (config.run_name or "")


def create_folder(config: RunSettings) -> Path:
    """Create a new folder for the run and return its path."""
    about = re.sub(r"[^\w.]+", "-", f"{Path(config.data).name}-{config.model}").lstrip(".-")
    while True:
        name = config.run_name or f"{about[:50]}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = expand(config.output_dir) / name
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another run started in the same second, or after the check
            check_run_folder(config, connected=True)
            if not path.exists():  # a folder above it is a broken link
                raise
            time.sleep(0.2)


def check_shared(folder: Path, holder: str) -> None:
    """Raise ValueError if this rank does not see the folder that the main process, `holder`, has
    locked.
    """
    for _ in range(20):  # a network file system may show a new file with a delay
        with suppress(OSError):
            if (folder / LOCK).read_text() == holder:
                return
        time.sleep(0.25)
    problem = f"{folder} is not the folder that rank 0 has created"
    raise UserError(problem, "choose an --output_dir that all machines share")
