"""Compare a run that is computed again with its log and its checkpoints, or with another run."""

import json
from collections.abc import Callable
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

Begin = Callable[[Path, int], Run]
"""Builds the run of a folder as it was at its last checkpoint before an update; collective."""


def verify(flags: ReplayConfig, ranks: Ranks, begin: Begin, recompute: Callable) -> None:
    """--verify: say and write which updates are equal; collective.

    `recompute` is that of replay.py. Raises UserError for the first update that differs from the
    log or from a checkpoint.
    """
    folder = expand(flags.run)
    start, *records = read_log(folder)
    logged = digests_of(*records)
    chosen = ranks.from_main(lambda: choose_updates(f"{flags.verify}", logged))
    saved = {step_of(path): path for path in checkpoints_of(folder / "checkpoints")}
    updates = {}
    checkpoints: dict = {}
    for first, last in parts_to_compute(chosen, saved).items():
        run = begin(folder, first + 1)
        for _ in recompute(run, iter(run.train_batches), last):
            step = run.state.step
            path = saved.get(step)
            differs = path and ranks.from_main(partial(changed, run, path))
            if logged.get(step) not in (None, run.state.digest[-1]):
                differs = "digest"
            if differs:
                fix = f"it was computed with {start['rounding']}, {start['versions']}"
                raise difference(run, step, differs, fix)
            checkpoints |= {path.name: files_of(path)} if path else {}
        run.log.close()
        updates[first + 1] = last
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


def difference(run: Run, update: int, what: str, fix: str) -> UserError:
    """The error that an update differs, with its samples."""
    samples = join_names(find_samples(run, update - 1))
    return UserError(f"update {update} differs ({what}); its samples: {samples}", fix)


def compare(flags: ReplayConfig, begin: Begin) -> None:
    """--against: say that the digests of two runs are equal; collective.

    Raises UserError for the first update that differs.
    """
    folders = expand(flags.run), expand(f"{flags.against}")
    one, other = (digests_of(*read_log(folder)) for folder in folders)
    common = one.keys() & other.keys()
    require(common, "the logs have no digests in common", "train both runs with --microbatches")
    for at in differing(one, other)[:1]:
        fix = "compare the settings and the data of both"
        raise difference(begin(folders[0], at), at, f"the first, from {folders[1]}", fix)
    say(f"equal in {len(common)} updates")
