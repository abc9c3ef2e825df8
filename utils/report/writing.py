"""Write report.html at the end of a training run or an evaluation. If that fails, the run only prints a warning."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.data.splits import Split
from utils.errors import one_line
from utils.files import write_file
from utils.report.analysis import analyse
from utils.report.folder import ANALYSIS, without_places
from utils.report.html import thumbnail
from utils.report.page import PAGE, write_page
from utils.runs.log import finite
from utils.tasks.task import Predictions, Task
from utils.training.run import Run


@dataclass(frozen=True)
class Evaluated:
    """An evaluation; `record` has its metrics and origin. If `predictions` is None, the older analysis is kept."""

    task: Task
    split: Split
    predictions: Predictions | None
    record: Mapping[str, Any]
    seed: int


def report_training(run: Run, result: Mapping[str, Any] | None = None) -> None:
    """Write the page of a run if it is complete; collective.

    `result` is an evaluation that has just ended, if any. Call this before its checkpoint is saved: if the run is
    killed while it writes, the resumed run evaluates and writes again.
    """
    if run.config.report and run.ended and not run.state.owes_evaluation:
        with run.ranks.agree("writing report.html", patient=True):
            if run.ranks.is_main:
                split, found = run.data.evaluation, run.evaluator.predictions if result else None
                record = {**(result or {}), "step": run.state.step, "split": split.name}
                evaluated = Evaluated(run.task, split, found, record, run.config.seed)
                write_report(run.folder, evaluated, run.log.say)


def report_evaluation(checkpoint: Path, evaluated: Evaluated, asked: bool, say: Callable[[str], None]) -> None:
    """Write the page again with this evaluation, if the checkpoint is in a run folder; `asked`: --report was given."""
    checkpoints = checkpoint.absolute().parent
    folder = checkpoints.parent
    if checkpoints.name == "checkpoints" and (folder / "log.jsonl").is_file():
        write_report(folder, evaluated, say)
    elif asked:
        say(f"--report has no effect: {checkpoint} is not in a run folder")


def write_report(folder: Path, evaluated: Evaluated, say: Callable[[str], None]) -> None:
    """Store the analysis of an evaluation in report.json, then write the page; an error is printed with `say`."""
    try:
        if evaluated.predictions is not None:
            analysis = analyse(evaluated.predictions, evaluated.task, evaluated.seed)
            for error in analysis["errors"]:
                error |= thumbnail(evaluated.split, error["index"])
            analysis["record"] = without_places(finite(evaluated.record))
            write_file(folder / ANALYSIS, json.dumps(analysis, allow_nan=False))
        write_page([folder], folder / PAGE)
    except Exception as error:  # of any class: the run itself has succeeded
        say(f"{PAGE} could not be written ({one_line(error)}); all other results are complete")
