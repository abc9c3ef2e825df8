"""The folder of a run: find it and the checkpoint to start from, create it, and lock it."""

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files import expand, holder_text, is_taken_over, lock
from utils.launch.environment import can_be_restarted
from utils.ranks.ranks import Ranks
from utils.runs.checkpoint import clean_up
from utils.runs.manifest import find_checkpoint, newest_good, verify
from utils.runs.metadata import SavedRun, read_checkpoint

_ORPHANS_LEAVE_WITHIN = 20.0  # seconds: ranks whose launcher was killed finish their update and save


class RunFolder:
    """An open run folder. The main process holds its lock, so that no other run writes to it."""

    def __init__(self, path: Path, held: TextIO | None = None):
        self.path, self._lock = path, held

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_own(self) -> None:
        """Raise OSError if the folder was deleted and now belongs to another run."""
        if self._lock is not None and is_taken_over(self.path, self._lock):
            raise OSError(f"{self.path} was deleted and now belongs to another run")


@dataclass(frozen=True)
class Start:
    """What a run starts from: its folder, if it already exists, and a checkpoint, if there is one."""

    folder: RunFolder | None = None
    saved: SavedRun | None = None


def check_run_folder(config: TrainConfig, after_meeting: bool = False) -> None:
    """Raise ValueError or OSError if the run folder is taken or cannot be created, or the checkpoint does not exist.

    After a restart by the launcher, an existing folder may be that of this run, so the check waits until the processes
    have connected (`after_meeting`). A launcher does not count restarts that the launcher of another machine began.
    """
    if can_be_restarted() and not after_meeting:
        return
    folder, parent = _named_folder(config), expand(config.output_dir)
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


def find_start(config: TrainConfig, ranks: Ranks) -> Start:
    """Find what --resume, or a restart by the launcher, starts from; collective.

    An existing folder is locked from now on. Only verified checkpoints are used. For --resume auto, or if --resume
    names a run folder, it is the newest good one.
    """
    # The main process may have to wait for the lock, and it verifies large files.
    found = ranks.run_on_main(lambda: _find(config, ranks), main_first=True)
    folder, path = found or (None, None)
    names = json.loads(ranks.broadcast_text(json.dumps([str(folder.path) if folder else "", str(path or "")])))
    if names[0] and not ranks.is_main:
        folder = RunFolder(Path(names[0]))
    saved = ranks.run_on_all(lambda: read_checkpoint(Path(names[1]))) if names[1] else None
    return Start(folder, saved)


def _find(config: TrainConfig, ranks: Ranks) -> tuple[RunFolder | None, Path | None]:
    """The locked folder and the verified checkpoint to start from, on the main process."""
    before, path = ranks.remembered("run-folder"), None
    if before:
        path = Path(before)
    else:
        check_run_folder(config, after_meeting=True)
        if config.run_name and (config.resume == "auto" or (config.resume and _named_folder(config).exists())):
            path = _named_folder(config)
    if path is not None and not path.exists():
        print(f"{path} does not exist; starting a new run")
    folder = _open(path, ranks) if path is not None else None
    checkpoint = None
    if folder is not None and (config.resume == "auto" or (before and ranks.remembered("started"))):
        checkpoint = _newest(folder.path)
    if checkpoint is None and config.resume not in (None, "auto"):
        checkpoint = _named_checkpoint(expand(config.resume))
    return folder, checkpoint


def _newest(folder: Path) -> Path | None:
    """The newest good checkpoint of a run; None if the run has not saved any. Reports damaged ones."""
    checkpoint, damages = newest_good(folder / "checkpoints")
    if damages and checkpoint is None:
        raise UserError(f"{'; '.join(damages)}; all checkpoints are damaged", "start a new run with another --run_name")
    for damage in damages:
        print(f"{damage}; resuming from {checkpoint} instead")
    if checkpoint is None and (folder / "log.jsonl").exists():
        print(f"{folder} has no checkpoint; starting from the beginning")
    return checkpoint


def _named_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest good one if it is a run folder."""
    if (path / "checkpoints").is_dir():
        path = _newest(path) or path
    checkpoint = find_checkpoint(path, prefer=("latest",))
    verify(checkpoint)
    return checkpoint


def _open(path: Path, ranks: Ranks) -> RunFolder:
    """Create the folder if it is missing, lock it, and remember it for a restart by the launcher."""
    folder = RunFolder(path)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path, lock(path, _ORPHANS_LEAVE_WITHIN))
    clean_up(folder.checkpoints)
    clean_up(path)
    ranks.remember("run-folder", str(path.absolute()))
    return folder


def open_run_folder(config: TrainConfig, start: Start, ranks: Ranks) -> RunFolder:
    """The folder of the run, which is created if the run is new; collective."""

    def create() -> RunFolder | None:
        if not ranks.is_main or start.folder is not None:
            return start.folder
        return _open(_create(config), ranks)

    folder = ranks.run_on_all(create)
    path = Path(ranks.broadcast_text(str(folder.path) if folder else ""))
    holder = ranks.broadcast_text(holder_text())
    ranks.run_on_all(lambda: None if ranks.is_main else _check_shared(path, holder))
    return folder or RunFolder(path)


def _create(config: TrainConfig) -> Path:
    """Make a new folder for the run and return its path."""
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


def _check_shared(folder: Path, holder: str) -> None:
    """Raise ValueError if this rank does not see the folder that the main process has locked."""
    for _ in range(20):  # a network file system may show a new file with a delay
        with suppress(OSError):
            if (folder / ".lock").read_text() == holder:
                return
        time.sleep(0.25)
    problem = f"{folder} is not the folder that rank 0 has created"
    raise UserError(problem, "choose an --output_dir that all machines share")


def _named_folder(config: TrainConfig) -> Path:
    return expand(config.output_dir) / (config.run_name or "")
