"""Write report.html at the end of a training run or an evaluation. A failure is a warning, never an error of the run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.config.settings import TrainConfig
from utils.data.splits import Split
from utils.errors import one_line
from utils.files import write_file
from utils.report.analysis import analyse
from utils.report.folder import ANALYSIS, without_places
from utils.report.page import PAGE, write_page
from utils.report.pictures import thumbnail
from utils.tasks.multilabel import MultiLabel
from utils.tasks.task import Task
from utils.training.predictions import Predictions
from utils.training.run import Run


def report_training(run: Run, result: Mapping[str, Any] | None) -> None:
    """Write the page of a run that is complete, on the main process; `result` is its last evaluation, if any."""
    state, split, found = run.state, run.data.evaluation, run.evaluator.predictions
    if not run.ranks.is_main or not run.config.report or not run.ended or state.owes_evaluation:
        return
    record = {**(result or {}), "step": state.step, "split": split.name}
    _write(run.folder.path, run.config, run.task, split, found if result else None, record, run.log.say)


def report_evaluation(
    checkpoint: Path,
    config: TrainConfig,
    task: Task,
    split: Split,
    found: Predictions,
    record: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Write the page again with this evaluation, if the checkpoint is in a run folder."""
    folder = checkpoint.absolute().parent.parent
    if (folder / "log.jsonl").is_file():
        _write(folder, config, task, split, found, record, say)


def _write(folder, config, task, split, found, record, say) -> None:
    try:
        if found is not None:
            write_analysis(folder, config, task, split, found, record)
        write_page([folder], folder / PAGE)
    except Exception as error:  # of any class: the run itself has succeeded
        say(f"{PAGE} could not be written ({one_line(error)}); all else is complete")


def write_analysis(
    folder: Path, config: TrainConfig, task: Task, split: Split, found: Predictions, record: Mapping[str, Any]
) -> None:
    """Analyse an evaluation and store the numbers and images that the page needs in report.json.

    `record` has the metrics of the evaluation and what was evaluated. Raises OSError or ValueError if an image cannot
    be read again, or the file cannot be written.
    """
    analysis = analyse(found, task.class_names, not isinstance(task, MultiLabel), config.threshold, config.seed)
    for error in analysis["errors"]:
        error |= thumbnail(split, error["index"])
    kept = {name: value for name, value in record.items() if not isinstance(value, list | dict)}
    write_file(folder / ANALYSIS, json.dumps({"record": without_places(kept), **analysis}))
