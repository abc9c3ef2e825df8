"""Tasks by name. To add one, write a subclass of Task (task.py) and add it to `TASKS`."""

import numpy as np

from utils.config import Registry, require
from utils.settings.tasks import TaskSettings
from utils.tasks.classification import Classification
from utils.tasks.task import Task


def auto(labels: np.ndarray | None) -> str:
    """multilabel if the labels are lists, else classification"""
    has_lists = labels is not None and labels.ndim == 2
    return "multilabel" if has_lists else "classification"


TASKS = Registry(
    "task",
    {
        "auto": auto,  # chooses one of the others
        "classification": Classification,
        "multilabel": "utils.tasks.multilabel:MultiLabel",
        "binary": "utils.tasks.multilabel:Binary",
    },
)


def make_task(
    config: TaskSettings,
    class_names: list[str],
    labels: np.ndarray | None = None,
    balanced: bool = False,
) -> tuple[str, Task]:
    """The name of the task, and the task. Its `metric` is --best_metric, if that is given.

    `labels` are those of the training split, as in Split; None if the task is only evaluated. If
    all classes are drawn equally often, `balanced`, the task gets each label once, so that balanced
    weights are 1.
    """
    name = config.task
    if name == "auto":
        name = auto(labels)
    weighs = config.class_weights is None or name == "classification"
    require(weighs, "--class_weights works only with --task classification", "leave it out")
    problem = f"--task binary: --data {config.data} has {len(class_names)} classes, not two"
    require(name != "binary" or len(class_names) == 2, problem, "use --task classification")
    if labels is not None and balanced:
        labels = np.unique(labels)
    task = TASKS.choose(name)(config, class_names, labels)
    task.metric = config.best_metric or task.metric
    found = [*task.summary(dict.fromkeys(task.evaluation, 1.0), 1.0), *task.gathered]
    known = [each for each in found if each in (*task.highest_is_best, *task.lowest_is_best)]
    fix = f"use one of {', '.join(known)}, or add it to lowest_is_best of {type(task).__name__}"
    require(task.metric in known, f"--best_metric {task.metric}: no such metric", fix)
    return name, task
