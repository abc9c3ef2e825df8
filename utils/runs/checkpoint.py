"""Find, save, load and delete the checkpoints of a run. A checkpoint is a folder that is complete
or does not exist.

RUN/checkpoints/step-00001234/   model.safetensors, optimizer.bin, scaler.pt of fp16   (Accelerator.save_state)
                                 ema.safetensors with --ema_decay                      (loading.py)
                                 state.json, config.yaml, samples.json.gz               (metadata.py)
                                 manifest.json                                         (size and SHA-256 of each)
RUN/checkpoints/latest, best     one line each: the name of such a folder
RUN/resumed_from.txt             the path of a checkpoint of another run that this run started from

What a start resumes from (`CheckpointManager.newest`):
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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from utils.config import require
from utils.errors import UserError
from utils.files import LOCK, check_output_folder, expand, holder_text, lock, read_text, write_file
from utils.launch import can_be_restarted
from utils.models import WeightAverage, is_sharded, tied_names
from utils.ranks import Ranks
from utils.runs.loading import (
    bytes_to_save,
    check_savable,
    extend_save_state,
    load_average,
    load_optimizer,
    load_scale,
)
from utils.runs.log import check_log
from utils.runs.manifest import ORIGIN, find_checkpoint, newest_good, verify
from utils.runs.metadata import Checkpoint, check_identity, read_checkpoint, read_settings
from utils.runs.state import TrainState
from utils.runs.writing import (
    clean_up,
    complete_files,
    delete_after,
    delete_failed,
    new_partial,
    partial_of,
    publish,
    update_pointers,
)
from utils.settings.runs import RunSettings
from utils.settings.train import TrainConfig

_ORPHANS_EXIT_WITHIN = 20.0  # seconds: ranks whose launcher was killed finish their update and save


class CheckpointManager:
    """The checkpoints of a run. The main process decides and writes.

    All public methods except `has_failed` are collective.

    Call `newest` first, which locks the run folder if it exists, then `restore`, which creates the
    folder of a new run.
    """

    def __init__(self, config: RunSettings, ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.folder: Path | None = None  # of the run
        # its settings, if it has no checkpoint of its own; set by `newest`
        self.begun: TrainConfig | None = None
        self._locked: TextIO | None = None  # on the main process, so that no other run writes there
        # Python waits for it before it exits, also after an error
        self._thread = ThreadPoolExecutor(1)
        self._saving: Future[None] | None = None  # the last save, on the main process, until `wait`
        # what checkpoints hold, set by `restore`
        self._tensors: tuple[nn.Module, Optimizer, WeightAverage | None]

    def newest(self) -> Checkpoint | None:
        """The verified checkpoint that --resume, or a restart by the launcher, starts from; None
        for a new run.

        For --resume auto, or if --resume names a run folder, it is the newest good one.
        """
        # The main process may have to wait for the lock, and it verifies large files.
        self.folder, checkpoint, self.begun = self.ranks.from_main(self._find, no_timeout=True)
        with self.ranks.agree():
            if checkpoint is None:
                return None
            saved = read_checkpoint(checkpoint)
            if saved.is_in(self.folder):
                check_identity(saved)
            return saved

    def restore(
        self,
        config: RunSettings,
        saved: Checkpoint | None,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        average: WeightAverage | None,
    ) -> Path:
        """Open the folder of the run, and load the state of the optimizer, the average of the weights
        and the loss scale from `saved`, if it is given.

        The `model` has its weights already. Deletes later checkpoints. `config` has the resolved
        settings; the name of a new folder contains the model. Raises ValueError, before any file is
        changed, if the tensors do not fit.
        """
        self.config = config
        self._tensors = (model, optimizer, average)
        extend_save_state(accelerator, model, optimizer, average)
        if saved is not None:
            with self.ranks.agree():
                load_optimizer(saved.path, optimizer)
                load_average(saved.path, average)
                load_scale(saved.path, accelerator.scaler)

        def create() -> tuple[Path, str]:
            return self.folder or self._lock(_create_folder(config)), holder_text()

        self.folder, holder = self.ranks.from_main(create)
        with self.ranks.agree():
            # closing the file would release the lock that the main process has on it
            if not self.ranks.is_main:
                _check_shared(self.folder, holder)
        with self.ranks.agree():
            if self.ranks.is_main and saved is not None:
                if saved.is_in(self.folder):
                    delete_after(
                        self.folder / "checkpoints", saved.state.step, saved.state.best_step
                    )
                else:
                    write_file(self.folder / ORIGIN, bytes(saved.path.absolute()))
        # after a restart, its own checkpoints come before that of --resume
        self.ranks.store_set(f"started-{config.run_name}", "yes")
        return self.folder

    @contextmanager
    def writing(self, state: TrainState, files: Mapping[str, bytes]) -> Iterator[Path | None]:
        """The folder into which `Accelerator.save_state` writes a checkpoint, after the last save
        is complete.

        None on ranks that must not call it: with DDP only the main process does, with FSDP2 all
        ranks do. The folder is not a checkpoint yet. After the block a thread of the main process
        adds the small `files` and completes it, see `wait`. Collective. Errors are raised on all
        ranks, except those of the block with FSDP2; older checkpoints do not change.
        """
        assert self.folder is not None
        folder = self.folder / "checkpoints"
        model, optimizer, average = self._tensors
        partial = partial_of(folder, state.step)
        sharded = is_sharded(model)
        error: Exception | None = None
        self.wait()
        with self.ranks.agree():
            if self.ranks.is_main:
                assert self._locked is not None
                _check_own(self.folder, self._locked)
                check_savable(optimizer)
                new_partial(folder, state.step, bytes_to_save(model, optimizer, average))
        self.ranks.enter_collective()
        try:
            yield partial if sharded or self.ranks.is_main else None
        except Exception as raised:
            gone = not partial.exists()  # another rank has failed, and says why
            error = delete_failed(partial, raised)
            # the other ranks are in a collective of `save_state`: this one cannot agree
            if sharded and not gone:
                raise error from raised
        with self.ranks.agree():
            if error is not None:
                raise error
            # Each rank deletes its own, because on a network file system the main process may not
            # see it yet.
            with suppress(OSError):
                (partial / f"random_states_{self.ranks.topology.rank}.pkl").unlink()
        if self.ranks.is_main:
            # In a thread, the `state_dict` behind these names would free weights that FSDP2 has
            # gathered.
            self._saving = self._thread.submit(
                self._complete, state.step, state.best_step, files, tied_names(model)
            )

    def wait(self) -> None:
        """Wait until the last save is complete; if it has failed, all ranks raise its error."""
        with self.ranks.agree():
            saving = self._saving
            self._saving = None
            if saving is not None:
                saving.result()

    @property
    def has_failed(self) -> bool:
        """Whether the thread of the main process has failed; then all ranks should call `wait`.

        Not collective.
        """
        saving = self._saving
        return bool(saving and saving.done() and saving.exception())

    def _complete(
        self, step: int, best_step: int | None, files: Mapping[str, bytes], tied: Iterable[str]
    ) -> None:
        """Called in a thread, with `self`, which holds the lock of the folder even if training has
        failed.
        """
        assert self.folder is not None
        folder = self.folder / "checkpoints"
        partial = partial_of(folder, step)
        try:
            complete_files(partial, files)
            publish(folder, step, tied)
        except Exception as error:
            raise delete_failed(partial, error) from error
        update_pointers(folder, step, best_step, self.config.keep)

    def _find(self) -> tuple[Path | None, Path | None, TrainConfig | None]:
        """The existing folder of the run, and the checkpoint and the settings to start from, if
        any, on the main process. The settings are those of a run without checkpoints.
        """
        config = self.config
        checkpoint = None
        begun = None
        before = self.ranks.store_get(f"run-folder-{config.run_name}")
        path = Path(before) if before else None
        if path is None:
            check_run_folder(config, connected=True)
            named = _named_folder(config)
            if config.run_name and config.resume and (config.resume == "auto" or named.exists()):
                path = named
        if path is not None:
            if not path.exists():
                print(f"{path} does not exist; starting a new run")
            self._lock(path)
            if config.resume == "auto" or (
                before and self.ranks.store_get(f"started-{config.run_name}")
            ):
                checkpoint = newest_good(path)
                if checkpoint is None:
                    checkpoint, begun = _beginning(path)
        if checkpoint is None and config.resume not in (None, "auto"):
            named = expand(config.resume)
            checkpoint = newest_good(named)
            if checkpoint is None:
                verify(checkpoint := find_checkpoint(named))
        if begun:
            start = checkpoint or "the beginning"
            print(
                f"{path} has no checkpoint; starting from {start}, with the settings of its config.yaml"
            )
        return path, checkpoint, begun

    def _lock(self, path: Path) -> Path:
        """Lock the folder, which is created if it is missing, and store its path for a restart by
        the launcher.
        """
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._locked = lock(path, _ORPHANS_EXIT_WITHIN)
        clean_up(path / "checkpoints")
        clean_up(path)
        self.ranks.store_set(f"run-folder-{self.config.run_name}", str(path.absolute()))
        return path


def _beginning(folder: Path) -> tuple[Path | None, TrainConfig | None]:
    """The checkpoint of another run that a run without checkpoints started from, and the settings of
    the run; None for each that it has not written.
    """
    origin = folder / ORIGIN
    settings = folder / "config.yaml"
    if (folder / "log.jsonl").exists():
        check_log(folder)
    try:
        checkpoint = Path(read_text(origin, 8192)) if origin.exists() else None
        if checkpoint:
            verify(checkpoint)
        return checkpoint, read_settings(folder) if settings.exists() else None
    except UserError as error:  # its fix is for another checkpoint or a --config file
        raise UserError(error.problem, "start a new run with another --run_name") from None


def _check_own(folder: Path, locked: TextIO) -> None:
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
    folder = _named_folder(config)
    resume = config.resume
    path = expand(resume).resolve() if resume not in (None, "auto") else None
    if path:
        find_checkpoint(path)
    if config.run_name and resume != "auto" and folder.exists():
        is_own = path is not None and folder.resolve() in (path, *path.parents)
        fix = "continue it with --resume auto, or choose another --run_name"
        require(is_own, f"{folder} exists", fix)
    check_output_folder("--output_dir", expand(config.output_dir))


def _named_folder(config: RunSettings) -> Path:
    """The folder of --run_name; without a name, the folder of all runs."""
    return expand(config.output_dir) / (config.run_name or "")


def _create_folder(config: RunSettings) -> Path:
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


def _check_shared(folder: Path, holder: str) -> None:
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
