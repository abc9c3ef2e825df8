"""Compare a run that is computed again with its log and its checkpoints, or with another run."""

import json
from collections.abc import Callable
from pathlib import Path

from utils.config.bounds import require
from utils.config.scripts import ReplayConfig
from utils.console import join_names, say
from utils.errors import UserError
from utils.files import expand, write_file
from utils.models.checking import hash_tensors
from utils.models.weight_files import read_weights
from utils.ranks.accelerator import leave_run
from utils.ranks.ranks import Ranks
from utils.replacing import RESULT, check_output
from utils.runs.digest import choose_updates, differing, digests_of, parts_to_compute
from utils.runs.log import read_log
from utils.runs.manifest import AVERAGE, MODEL, beginnings, damage_of, files_of
from utils.runs.metadata import versions
from utils.training.divergence import find_samples
from utils.training.run import Run


def verify(flags: ReplayConfig, ranks: Ranks, begin: Callable, recompute: Callable) -> None:
    """--verify: say and write which updates are equal; collective.

    `begin` and `recompute` are those of replay.py: the first builds the run of a folder as it was
    at its last checkpoint before an update, and the second computes up to an update. Raises
    UserError for the first update that differs from the log or from a checkpoint.
    """
    folder = expand(flags.run)
    records = read_log(folder)
    logged = digests_of(*records)
    trained = [each["step"] for each in records if each["kind"] == "train"]
    every = range(records[0]["step"] + 1, max(trained, default=0) + 1)
    chosen = ranks.from_main(lambda: choose_updates(f"{flags.verify}", logged, every))
    ranks.from_main(lambda: check_output(flags, "json", RESULT))
    saved = beginnings(folder, records)
    updates = []
    checkpoints = {}
    for first, last in parts_to_compute(chosen, saved).items():
        run = begin(folder, first + 1)
        for _ in recompute(run, iter(run.train_batches), last):
            step = run.state.step
            if logged.get(step) not in (None, run.state.digest[-1]):
                raise difference(run, step, "digest")
            if path := saved.get(step):
                if file := changed(run, path):
                    raise difference(run, step, file)
                checkpoints[path.name] = files_of(path)
        run.log.close()
        data = run.data.fingerprint
        del run
        leave_run()
        updates.append(f"{first + 1} to {last}")
    weights = join_names(checkpoints)
    say(
        f"{folder}: equal in updates {join_names(updates)}, and in the weights of {weights or 'none'}"
    )
    result = {
        "updates": updates,
        "checkpoints": checkpoints,
        "data": data,
        "settings": (folder / "config.yaml").read_text(),
        "versions": versions(),
        "rounding": ranks.rounding,
    }
    if flags.json and ranks.is_main:
        write_file(expand(flags.json), json.dumps(result, indent=1) + "\n")


def changed(run: Run, checkpoint: Path) -> str | None:
    """The file of a checkpoint whose tensors are not those of the run, or damage, if any."""
    found = damage_of(checkpoint)
    for file, owner in ((MODEL, run.module), (AVERAGE, run.average)):
        if owner and not found:
            saved = read_weights(checkpoint / file)
            own = owner.state_dict()
            if hash_tensors(saved.values()) != hash_tensors(map(own.__getitem__, saved)):
                found = f"{checkpoint / file}"
    return found


def difference(run: Run, update: int, what: str) -> UserError:
    """The error that an update differs, with its samples."""
    problem = f"update {update} differs ({what}); its samples: "
    fix = "use the data, versions, threads and kind of device of its log, or find what has changed"
    return UserError(problem + join_names(find_samples(run, update - 1)), fix)


def compare(flags: ReplayConfig, begin: Callable) -> None:
    """--against: say that the digests of two runs are equal; collective.

    Raises UserError for the first update that differs.
    """
    folder = expand(flags.run)
    one = digests_of(*read_log(folder))
    other = digests_of(*read_log(expand(f"{flags.against}")))
    common = one.keys() & other.keys()
    require(common, "the logs have no digests in common", "train both runs with --microbatches")
    for at in differing(one, other)[:1]:
        raise difference(begin(folder, max(one) + 1), at, f"the first, from {flags.against}")
    say(f"equal in {len(common)} updates")
