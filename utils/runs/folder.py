"""The folder of a run: its name, its lock, and the checkpoint in it to start from."""

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from utils.config.settings import TrainConfig
from utils.files import expand, holder_text, is_taken_over, lock
from utils.launch.environment import restarts_are_possible
from utils.ranks.ranks import Ranks
from utils.runs.checkpoint import clean_up
from utils.runs.manifest import find_checkpoint, newest_good, verify
from utils.runs.resume import batch_of_start

_ORPHANS_LEAVE_WITHIN = 20.0  # seconds: ranks whose launcher was killed finish their update and save


def check_run_folder(config: TrainConfig, after_meeting: bool = False) -> None:
    """Raise ValueError or OSError when the run folder is taken or cannot be made, or the checkpoint is not there.

    After a restart by the launcher the folder that exists may be the run's own: then it is checked `after_meeting`.
    The launcher of a machine does not count a restart that another machine's began.
    """
    if restarts_are_possible() and not after_meeting:
        return
    if config.resume not in (None, "auto"):
        find_checkpoint(expand(config.resume), prefer=("latest",))
        folder = _named_folder(config)
        path = expand(config.resume).resolve()
        if config.run_name and folder.exists() and folder.resolve() not in (path, *path.parents):
            raise ValueError(f"{folder} exists and is another run than {config.resume}; choose another --run_name")
    parent = expand(config.output_dir)
    if config.run_name and config.resume is None and _named_folder(config).exists():
        raise ValueError(
            f"{_named_folder(config)} exists; go on with it by --resume auto, or choose another --run_name"
        )
    existing = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"--output_dir {parent}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {parent}: {existing} is not writable")


@dataclass
class Start:
    """Where a run starts: its folder, unless that is made later; the checkpoint to go on from, if any; its lock."""

    folder: Path | None = None
    checkpoint: Path | None = None
    lock: TextIO | None = None

    def check_own(self) -> None:
        """Raise OSError when the folder that this process locked was deleted and is another run's by now."""
        if self.lock is not None and is_taken_over(self.folder, self.lock):
            raise OSError(f"{self.folder} was deleted and is another run's now")


def find_start(config: TrainConfig, ranks: Ranks) -> tuple[TrainConfig, Start]:
    """What --resume or a launcher's restart means, and the settings with the batch sizes of this start; collective.

    Nobody else writes to the folder from here on. Only verified checkpoints are taken: with `auto`, or a run folder,
    the newest good one.
    """
    start = Start()

    def find() -> str:
        if not ranks.is_main:
            return ""
        before = ranks.remembered("run-folder")
        if before:
            start.folder = Path(before)
        else:
            check_run_folder(config, after_meeting=True)
            goes_on_there = config.resume == "auto" or (config.resume and _named_folder(config).exists())
            start.folder = _named_folder(config) if config.run_name and goes_on_there else None
        if start.folder is not None:
            if not start.folder.exists():
                print(f"{start.folder} does not exist; beginning a new run")
            _lock_folder(start, ranks)
        if config.resume == "auto" or (before and ranks.remembered("started")):
            start.checkpoint = _newest(start.folder)
        if start.checkpoint is None and config.resume not in (None, "auto"):
            start.checkpoint = _named_checkpoint(expand(config.resume))
        return json.dumps([str(path or "") for path in (start.folder, start.checkpoint)])

    found = ranks.broadcast_text(
        ranks.run_on_all(find, main_first=True)
    )  # it may have to wait, and verifies large files
    start.folder, start.checkpoint = (Path(path) if path else None for path in json.loads(found))
    derived = ranks.run_on_all(lambda: batch_of_start(config, start.checkpoint, ranks.topology.world_size))
    if ranks.is_main and derived.batch_size is None and config.batch_size is not None:
        asked = f"--batch_size {config.batch_size}" + f" --grad_accum {config.grad_accum}" * bool(config.grad_accum)
        print(f"{asked} cannot make the run's global batch of {derived.global_batch_size} here; see the batch below")
    return derived, start


def _newest(folder: Path) -> Path | None:
    """The newest good checkpoint of a run, None when it has saved none; the bad ones are said aloud."""
    checkpoint, damages = newest_good(folder / "checkpoints")
    if damages and checkpoint is None:
        raise ValueError(f"{'; '.join(damages)}; no checkpoint is good: begin the run anew under another --run_name")
    for damage in damages:
        print(f"{damage}; going on from {checkpoint} instead")
    if checkpoint is None and (folder / "log.jsonl").exists():
        print(f"{folder} has no checkpoint; beginning anew")
    return checkpoint


def _named_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest good one of the run that it is."""
    if (path / "checkpoints").is_dir():
        path = _newest(path) or path
    checkpoint = find_checkpoint(path, prefer=("latest",))
    verify(checkpoint)
    return checkpoint


def _lock_folder(start: Start, ranks: Ranks) -> None:
    """Make the folder where it is missing, lock it, and leave its name to the attempt after a restart."""
    (start.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    start.lock = lock(start.folder, _ORPHANS_LEAVE_WITHIN)
    clean_up(start.folder / "checkpoints")
    ranks.remember("run-folder", str(start.folder.absolute()))


def make_run_folder(config: TrainConfig, start: Start, ranks: Ranks) -> Path:
    """The run folder, made now for a run that starts afresh; collective."""

    def make() -> str:
        if not ranks.is_main or start.folder is not None:
            return str(start.folder or "")
        about = re.sub(r"[^\w.]+", "-", f"{Path(config.data).name}-{config.model}").lstrip(".-")
        name = config.run_name or f"{about[:50]}-{time.strftime('%Y%m%d-%H%M%S')}"
        start.folder = folder = expand(config.output_dir) / name
        for number in range(2, 100):
            try:
                start.folder.mkdir(parents=True)
                break
            except FileExistsError:  # another run of the same second, or of the same name since it was checked
                if config.run_name:
                    raise
                start.folder = folder.with_name(f"{name}-{number}")
        _lock_folder(start, ranks)
        return str(start.folder)

    start.folder = Path(ranks.broadcast_text(ranks.run_on_all(make)))
    holder = ranks.broadcast_text(holder_text())
    ranks.run_on_all(lambda: ranks.is_main or _check_shared(start.folder, holder))
    return start.folder


def _check_shared(folder: Path, holder: str) -> None:
    """Raise ValueError on a rank that finds another folder, or none, where the main process has locked one."""
    for _ in range(20):  # a network file system may show a new file late
        with suppress(OSError):
            if (folder / ".lock").read_text() == holder:
                return
        time.sleep(0.25)
    raise ValueError(f"{folder} is not the folder that rank 0 has made; --output_dir must be shared by all machines")


def _named_folder(config: TrainConfig) -> Path:
    return expand(config.output_dir) / (config.run_name or "")
