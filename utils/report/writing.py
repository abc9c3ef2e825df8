"""Write report.html at the end of a training run or an evaluation.

If that fails, the run only prints a warning.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from utils.console import say
from utils.data.splits import Split
from utils.errors import one_line
from utils.files import write_file
from utils.report.analysis import analyse
from utils.report.folder import ANALYSIS, read_analysis, read_run, without_places
from utils.report.html import thumbnail
from utils.report.page import PAGE, write_page
from utils.runs.log import finite
from utils.tasks.task import Predictions, Task
from utils.training.run import Run
from utils.training.summary import always_answering

_STORED = "best_predictions.npz"  # in the run folder, until the page is written


@dataclass(frozen=True)
class Evaluated:
    """An evaluation; `record` has its metrics and origin.

    `common` is the most frequent class of the training images. If it is None, the class of the
    older analysis is used, if there is one. If `predictions` is None, the older analysis is kept.
    """

    task: Task
    split: Split
    predictions: Predictions | None
    record: Mapping[str, Any]
    seed: int
    common: str | None = None


def report_training(run: Run, result: Mapping[str, Any] | None = None) -> None:
    """Write the page of a run if it is complete; collective.

    `result` is an evaluation that has just ended, if any. The page shows the best checkpoint, which
    eval.py evaluates too. So the predictions of the best checkpoint so far are stored, where a
    resumed run finds them. They are analysed only at the end, because this takes time. Call this
    before the checkpoint is saved: if the run is killed while it writes, the resumed run evaluates
    and writes again.
    """
    state, found, stored = run.state, run.evaluator.predictions, run.folder / _STORED
    if (
        result
        and found
        and run.config.report
        and run.ranks.is_main
        and state.best_step in (None, state.step)
    ):
        with _warned():
            file = BytesIO()
            np.savez(file, step=state.step, **found._asdict())
            write_file(stored, file.getvalue())
    if run.config.report and run.ended and not state.owes_evaluation:
        with run.ranks.agree("writing report.html", no_timeout=True):
            if run.ranks.is_main:
                with _warned():
                    record = read_run(run.folder, images=False)["best"]
                    found = _read(stored, record["step"]) if result else None
                    common = (always_answering(run.data) or [None])[0]
                    split = run.data.evaluation
                    write_report(
                        run.folder,
                        Evaluated(run.task, split, found, record, run.config.seed, common),
                    )
                    stored.unlink(missing_ok=True)


def _read(path: Path, step: int) -> Predictions | None:
    """The stored predictions, if they are those of the evaluation after this update."""
    with suppress(Exception), np.load(path) as values:  # a damaged file raises errors of any class
        if values["step"] == step:
            return Predictions(*(values[name] for name in Predictions._fields))
    return None


def report_evaluation(checkpoint: Path, evaluated: Evaluated, asked: bool) -> None:
    """Write the page again with this evaluation, if the checkpoint is in a run folder; `asked`:
    --report was given.
    """
    checkpoints = checkpoint.absolute().parent
    folder = checkpoints.parent
    if checkpoints.name == "checkpoints" and (folder / "log.jsonl").is_file():
        with _warned():
            write_report(folder, evaluated)
    elif asked:
        say(f"--report has no effect: {checkpoint} is not in a run folder")


def write_report(folder: Path, evaluated: Evaluated) -> None:
    """Store the analysis of an evaluation in report.json, then write the page."""
    path, found, names = folder / ANALYSIS, evaluated.predictions, evaluated.task.class_names
    if found is not None:
        analysis = analyse(found, evaluated.task, evaluated.seed)
        for error in analysis["errors"]:
            error |= thumbnail(evaluated.split, error["index"])
        common = evaluated.common or read_analysis(folder).get("always", {}).get("class")
        if common in names and found.labels.ndim == 1:
            share = float((found.labels == names.index(common)).mean())
            analysis["always"] = {"class": common, "accuracy": share}
        analysis["record"] = without_places(finite(evaluated.record))
        write_file(path, json.dumps(analysis, allow_nan=False))
    write_page([folder], folder / PAGE)


@contextmanager
def _warned() -> Iterator[None]:
    """Print an error of any class instead of raising it, because the run itself has succeeded."""
    try:
        yield
    except Exception as error:
        say(f"{PAGE} could not be written ({one_line(error)}); all other results are complete")
