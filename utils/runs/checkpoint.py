"""Find, save, load and delete the checkpoints of a run. A checkpoint is a folder that is complete
or does not exist.

RUN/checkpoints/step-00001234/
    model.safetensors, optimizer.bin       by Accelerator.save_state, with fp16 also scaler.pt
    ema.safetensors                        with --ema_decay, see save_state.py
    state.json, config.yaml, samples.parquet    see metadata.py
    manifest.json                          the size and the SHA-256 of each file
RUN/samples-SHA256.parquet                 the table of samples; those of checkpoints are hard links
RUN/checkpoints/latest, best               one line each: the name of such a folder
RUN/resumed_from.txt                       the checkpoint of another run that this run started from
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from utils.config import require
from utils.data import TABLE_FILE, sha256_in
from utils.files import holder_text, lock, write_file
from utils.models import WeightAverage, is_sharded, tied_names
from utils.ranks import Ranks
from utils.runs.folder import (
    check_own,
    check_shared,
    create_folder,
    find_start,
)
from utils.runs.loading import load_average, load_optimizer, load_scale
from utils.runs.manifest import ORIGIN
from utils.runs.metadata import Checkpoint, check_identity, read_checkpoint
from utils.runs.save_state import bytes_to_save, check_savable, extend_save_state, unwrapped
from utils.runs.state import TrainState
from utils.runs.writing import (
    clean_up,
    delete_after,
    delete_failed,
    finish_partial,
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

        def find() -> tuple[Path | None, Path | None, TrainConfig | None]:
            return find_start(self.config, self.ranks.store_get, self._lock)

        # The main process may have to wait for the lock, and it verifies large files.
        self.folder, checkpoint, self.begun = self.ranks.from_main(find, no_timeout=True)
        with self.ranks.agree():
            if checkpoint is None:
                return None
            saved = read_checkpoint(checkpoint)
            problem = f"{checkpoint}: has no table of its samples"
            fix = (
                f"copy {TABLE_FILE} too; for a run of Lockstep 0.2, use that version, or start a "
                "new run with --init_from"
            )
            require(saved.table_file, problem, fix)
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
        """Open the folder of the run, and load the state of the optimizer, the average of the
        weights and the loss scale from `saved`, if it is given.

        The `model` has its weights already. Deletes later checkpoints. `config` has the resolved
        settings; the name of a new folder contains the model. Raises ValueError, before any file is
        changed, if the tensors do not fit.
        """
        self.config = config
        self._tensors = (model, optimizer, average)
        extend_save_state(accelerator, model, optimizer, average)
        if saved is not None:
            with self.ranks.agree():
                if saved.state.step > 0:  # before, the optimizer has no state
                    load_optimizer(saved.path, optimizer)
                load_average(saved.path, average)
                load_scale(saved.path, accelerator.scaler)

        def create() -> tuple[Path, str]:
            return self.folder or self._lock(create_folder(config)), holder_text()

        self.folder, holder = self.ranks.from_main(create)
        with self.ranks.agree():
            # closing the file would release the lock that the main process has on it
            if not self.ranks.is_main:
                check_shared(self.folder, holder)
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
    def writing(
        self, state: TrainState, files: Mapping[str, bytes | Path]
    ) -> Iterator[Path | None]:
        """The folder into which `Accelerator.save_state` writes a checkpoint, after the last save
        is complete.

        None on ranks that must not call it: with DDP only the main process does, with FSDP2 all
        ranks do. The folder is not a checkpoint yet. After the block a thread of the main process
        adds the other `files` and completes it, see `wait`. Collective. Errors are raised on all
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
                check_own(self.folder, self._locked)
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
        if sharded and state.step == 0:
            # To save an optimizer without state, PyTorch has made a step with zero gradients, which
            # AdamW would count.
            unwrapped(optimizer).state.clear()
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
        self,
        step: int,
        best_step: int | None,
        files: Mapping[str, bytes | Path],
        tied: Iterable[str],
    ) -> None:
        """Called in a thread, with `self`, which holds the lock of the folder even if training has
        failed.
        """
        assert self.folder is not None
        folder = self.folder / "checkpoints"
        partial = partial_of(folder, step)
        try:
            finish_partial(partial, files)
            known = {
                name: sha256_in(file) for name, file in files.items() if isinstance(file, Path)
            }
            publish(folder, step, known, tied)
        except Exception as error:
            raise delete_failed(partial, error) from error
        update_pointers(folder, step, best_step, self.config.keep)

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
