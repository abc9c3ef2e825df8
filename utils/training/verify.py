"""Compare a run that is computed again with its log and its checkpoints, or two runs."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from utils.config.bounds import require
from utils.config.scripts import ReplayConfig
from utils.console import join_names, say
from utils.errors import UserError
from utils.files import expand, write_file
from utils.models.checking import hash_tensors
from utils.models.weight_files import read_weights
from utils.ranks.ranks import Ranks
from utils.runs.digest import choose_updates, differing, digests_of, parts_to_compute
from utils.runs.log import read_log
from utils.runs.manifest import AVERAGE, MODEL, checkpoints_of, damage_of, files_of, step_of
from utils.runs.metadata import versions
from utils.training.divergence import find_samples
from utils.training.run import Run

_FIX = "restore what has changed, or use what it was trained with"
Again = Callable[..., Iterator[Run]]
"""Computes a run again: (folder, first update, last update, updates to stop after). It yields the
run at its last checkpoint before the first update, then after each synchronisation. Collective."""


def verify(flags: ReplayConfig, ranks: Ranks, again: Again) -> None:
    """--verify: say and write which updates are equal; collective.

    Raises UserError for the first one that differs from the log, or from a checkpoint.
    """
    folder = expand(flags.run)
    start, *records = read_log(folder)
    logged = digests_of(*records)
    chosen = ranks.from_main(lambda: choose_updates(f"{flags.verify}", logged))
    saved = {step_of(path): path for path in checkpoints_of(folder / "checkpoints")}
    updates = {}
    checkpoints = {}
    for first, last in parts_to_compute(chosen, saved).items():
        for run in again(folder, first + 1, last, saved):
            step = run.state.step
            wrong = differing(digests_of(vars(run.state)), logged)
            path = saved.get(step) if step > first else None
            what = "digest" if wrong else path and ranks.from_main(partial(changed, run, path))
            if what:
                at = (wrong or [step])[0]
                problem = f"update {at} differs ({what}); its samples: {name_samples(run, at)}"
                raise UserError(problem, f"{_FIX}: {start['rounding']}, {start['versions']}")
            updates[first + 1] = step
            checkpoints |= {path.name: files_of(path)} if path else {}
    equal = join_names(f"{first} to {last}" for first, last in updates.items())
    say(f"{folder}: equal in updates {equal}, and in the weights of {join_names(checkpoints)}")
    result = {
        "updates": updates,
        "checkpoints": checkpoints,
        "data": run.data.fingerprint,
        "settings": (folder / "config.yaml").read_text(),
        "versions": versions(),
        "rounding": ranks.rounding,
        "processes": ranks.topology.world_size,
    }
    if flags.json and ranks.is_main:
        write_file(expand(flags.json), json.dumps(result, indent=1) + "\n")


def changed(run: Run, checkpoint: Path) -> str:
    """The file of a checkpoint whose tensors are not those of the run, or damage; empty if there is
    none.
    """
    found = damage_of(checkpoint) or ""
    for file, owner in ((MODEL, run.module), (AVERAGE, run.average)):
        if owner and not found:
            saved = read_weights(checkpoint / file)
            own = owner.state_dict()
            same = hash_tensors(saved.values()) == hash_tensors(map(own.__getitem__, saved))
            found = "" if same else f"{checkpoint / file}"
    return found


def name_samples(run: Run, update: int) -> str:
    """The samples of an update, by their files or as rows of the data set."""
    paths = getattr(run.data.train.images, "paths", None)
    return join_names(paths[row] if paths else row for row in find_samples(run, update - 1))


def compare(flags: ReplayConfig, again: Again) -> None:
    """--against: say that the digests of two runs are equal; collective.

    Raises UserError for the first update that differs.
    """
    folders = expand(flags.run), expand(f"{flags.against}")
    one, other = (digests_of(*read_log(folder)) for folder in folders)
    common = one.keys() & other.keys()
    require(common, "the logs have no digests in common", "train both runs with --microbatches")
    for at in differing(one, other)[:1]:
        names = [name_samples(next(again(folder, at, 0)), at) for folder in folders]
        problem = f"update {at} is the first that differs; its samples: {' / '.join({*names})}"
        raise UserError(problem, "compare the settings and the data of the runs")
    say(f"equal in {len(common)} updates")
