"""What looks at a run, a machine or a file. A run has the same bits without it.

The functions below are what train.py and eval.py use. Each loads its module when it is called. If
this folder is deleted, both scripts work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import utils  # noqa: F401  sets variables before PyTorch is loaded

if TYPE_CHECKING:  # loading them takes seconds
    from torch.profiler import profile

    from utils.data import Batch, Split
    from utils.settings.train import TrainConfig
    from utils.tasks import Predictions, Task
    from utils.training import Run


def settings_of_dry_run(config: TrainConfig) -> TrainConfig:
    """The settings of a dry run: those given, in a new run folder."""
    from extras.dry_run import settings_of_dry_run

    return settings_of_dry_run(config)


def load_page() -> None:
    """Load the code that writes pages now, because its files may have changed when the run ends."""
    import extras.page.report  # noqa: F401


def find_copies(run: Run) -> tuple[Sequence, Sequence[str]]:
    """The images that occur twice in the data of a run, and lines about them; collective."""
    if run.config.report:
        load_page()
    from extras.copies import copies_of

    return copies_of(run)


def write_first_batch(run: Run, batch: Batch) -> None:
    """Write first_batch.png, a picture of the images as the model receives them."""
    from extras.first_batch import write_first_batch

    write_first_batch(run, batch)


def make_profiler(run: Run) -> AbstractContextManager[profile | None]:
    """With --profile, a context that records ten updates."""
    from extras.profile import make_profiler

    return make_profiler(run)


# not named dry_run: importing the module extras.dry_run would replace this function
def compute_one_update(run: Run, update: Callable[[Run, Iterator[Batch]], None]) -> None:
    """Compute one update and one evaluation batch for --dry_run, and leave nothing behind;
    collective.
    """
    from extras.dry_run import dry_run

    dry_run(run, update)


def report(run: Run, result: Mapping | None = None) -> None:
    """Store the predictions of the best evaluation and of a fitted head; once the run is complete,
    compare the last ones with those of the head, and write report.html; collective.
    """
    if run.config.fits_head and result:
        from extras.head_alone import compare_with_head

        compare_with_head(run)
    if run.config.report:
        from extras.page.report import report_training

        report_training(run, result)


def report_evaluation(
    checkpoint: Path, task: Task, split: Split, found: Predictions, record: Mapping
) -> bool:
    """Write report.html of an evaluation; returns whether the checkpoint is in a run folder."""
    from extras.page.report import run_folder_of, warned, write_report

    folder = run_folder_of(checkpoint)
    if folder:
        with warned():
            write_report(folder, task, split, found, record)
    return folder is not None


def write_predictions(path: Path, task: Task, split: Split, found: Predictions) -> None:
    """Write a table with the prediction of each sample, in the format of the name of the file."""
    from extras.page.predictions import encode, rows_of_split
    from utils.files import write_file

    write_file(path, encode(rows_of_split(task, split, found), path))
