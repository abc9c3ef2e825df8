"""Write report.html at the end of a training run or an evaluation.

If that fails, the run only prints a warning.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from extras.page.analysis import analyse
from extras.page.html import thumbnail
from extras.page.page import (
    ANALYSIS,
    PAGE,
    PREDICTIONS,
    read_analysis,
    read_run,
    without_places,
    write_page,
)
from extras.page.predictions import encode, rows_of_split
from utils.console import say
from utils.data import Split, fingerprint_of, group_keys
from utils.errors import one_line
from utils.files import whole_file, write_file
from utils.runs import nan_to_none
from utils.tasks import Predictions, Task
from utils.training import Run, always_answering

_STORED = "best_predictions.npz"  # in the run folder, until the page is written
FOLD = "fold_predictions.json"  # in the folder of a complete run with --fold


def report_training(run: Run, result: Mapping | None = None) -> None:
    """Write the page of a run if it is complete; collective.

    `result` is an evaluation that has just ended, if any. The page shows the best checkpoint, which
    eval.py evaluates too. So the predictions of the best checkpoint so far are stored, where a
    resumed run finds them. They are analysed only at the end, because this takes time. Call this
    before the checkpoint is saved: if the run is killed while it writes, the resumed run evaluates
    and writes again.
    """
    state = run.state
    found = run.evaluator.predictions
    stored = run.folder / _STORED
    if not run.config.report:
        return
    if run.ranks.is_main and result and found and state.best_step in (None, state.step):
        with warned(), whole_file(stored) as file:
            np.savez(file, step=state.step, **found._asdict())
    if run.is_complete:
        with run.ranks.agree("writing report.html", no_timeout=True):
            if run.ranks.is_main:
                with warned():
                    if found and run.config.fold and not run.config.max_eval_samples:
                        _write_fold(run, found)
                    record = read_run(run.folder, images=False)["best"]
                    common = (always_answering(run.data) or [None])[0]
                    best = _read(stored, record["step"])
                    write_report(run.folder, run.task, run.data.evaluation, best, record, common)
                    stored.unlink(missing_ok=True)


def _write_fold(run: Run, found: Predictions) -> None:
    """Write the predictions of the last weights: the best ones were chosen on the fold."""
    config = run.config
    split = run.data.evaluation
    table = run.data.table
    origin = [table.class_names, config.seed, config.group_by, *sorted(run.data.bad_images)]
    if not table.train.has_files:  # of the whole split
        origin += [table.train.labels, table.train.content]
    else:
        for part in table.parts:
            labels = part.split.labels.tolist()
            origin += zip(part.names, part.checksums.tolist(), labels, strict=True)
    name = fingerprint_of(*sorted(map(str, origin)))[:8]
    keys = group_keys(split, config.group_by or "", run.data.class_names)
    rows = rows_of_split(run.task, split, found)
    for place, row in enumerate(rows):
        row |= {"split": f"{config.fold} of {name}", "group": keys[place], "step": run.state.step}
        if "path" in row:
            row["path"] = os.path.abspath(split.describe(place))
    path = run.folder / FOLD
    write_file(path, encode(rows, path))


def _read(path: Path, step: int) -> Predictions | None:
    """The stored predictions, if they are those of the evaluation after this update."""
    with suppress(Exception), np.load(path) as values:  # a damaged file raises errors of any class
        if values["step"] == step:
            return Predictions(*(values[name] for name in Predictions._fields))
    return None


def run_folder_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint; None if it was moved out of it."""
    folder = checkpoint.absolute().parent
    is_in_run = folder.name == "checkpoints" and (folder.parent / "log.jsonl").is_file()
    return folder.parent if is_in_run else None


def write_report(
    folder: Path,
    task: Task,
    split: Split,
    found: Predictions | None,
    record: Mapping,
    common: str | None = None,
) -> None:
    """Store an evaluation in predictions.npz and report.json, then write the page.

    `record` has the metrics and the origin of the evaluation. `common` is the most frequent class
    of the training images. If it is None, the class of the older analysis is used, if there is one.
    If `found` is None, the older analysis is kept.
    """
    if found:
        analysis = analyse(found, task)
        names = task.class_names
        for error in analysis["errors"]:
            error |= thumbnail(split, error["index"])
        common = common or read_analysis(folder).get("always", {}).get("class")
        if common in names and found.labels.ndim == 1:
            share = float((found.labels == names.index(common)).mean())
            analysis["always"] = {"class": common, "accuracy": share}
        analysis["record"] = without_places(nan_to_none(record))
        with whole_file(folder / PREDICTIONS) as file:
            origin = fingerprint_of(split.label_fingerprint, split.content, *names)
            kept = {"images": split.image_index[found.indices], "classes": names, "origin": origin}
            np.savez(file, **kept, **found._asdict())
        write_file(folder / ANALYSIS, json.dumps(analysis, allow_nan=False))
    write_page([folder], folder / PAGE)


@contextmanager
def warned(what: str = PAGE) -> Iterator[None]:
    """Print an error of any class instead of raising it, because the run itself has succeeded."""
    try:
        yield
    except Exception as error:
        say(f"{what} could not be written ({one_line(error)}); all other results are complete")
