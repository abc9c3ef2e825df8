"""Compare the predictions of the last weights of a run with those of update 0, its head alone."""

from types import SimpleNamespace

import numpy as np

from extras.compare.pairs import compare, unit_of, values_of
from extras.page.report import warned
from utils.console import say
from utils.files import whole_file
from utils.training import Run

STORED = "head_predictions.npz"  # in the run folder: those of update 0


def compare_with_head(run: Run) -> None:
    """After update 0, store the predictions; after the last update, print and log how the last
    predictions differ from them.
    """
    found, state, task = run.evaluator.predictions, run.state, run.task
    last = state.evaluation.get(task.metric)  # some metrics are undefined if a class is missing
    if not (found and run.ranks.is_main) or last is None:
        return
    path = run.folder / STORED
    with warned("the comparison with the head alone"):
        if state.step == 0:
            with whole_file(path) as file:
                np.savez(file, images=found.indices, metric=last, **found._asdict())
        elif run.is_complete and path.is_file():
            with np.load(path) as stored:
                head = SimpleNamespace(**stored)
            both = [head, SimpleNamespace(images=found.indices, **found._asdict())]
            values = values_of(both, task)
            mean, half, *_ = compare(values[1:] - values[:1], len(found.indices))
            scale, unit = unit_of(task)
            size, low, high = (f"{scale * (mean + side * half):+.3g}" for side in (0, -1, 1))
            text = f"all layers {last:.4f}, the head alone (update 0) {head.metric:.4f}: "
            text += f"{size} {unit} (95 % interval {low} to {high})"
            if abs(mean) < half:
                text += ", cannot be told apart"
            text += f" on {len(found.indices):,} images; best: update {state.best_step}"
            run.log.write("head_alone", step=state.step, text=text)
            say(text)
