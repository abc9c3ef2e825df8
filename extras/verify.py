"""Compare a run that is computed again with its log and its checkpoints, or with another run.

With --microbatches, train records have a digest of each update. It is a sum of the bits of the
summed gradient and of the weights after the update, in hex (`TreeGradients.add_digest`). It detects
faults and changes, but it is not a signature.
"""

import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from utils.config import require
from utils.console import join_names, say
from utils.data import load_data
from utils.errors import UserError
from utils.files import expand, write_file
from utils.models import distinct_state, hash_tensors, read_weights
from utils.ranks import Ranks, leave_run
from utils.replacing import RESULT, check_output
from utils.runs import (
    EMA_FILE,
    WEIGHTS_FILE,
    beginnings,
    checkpoints_of,
    damage_of,
    files_of,
    find_checkpoint,
    read_checkpoint,
    read_log,
    read_settings,
    step_of,
    versions,
)
from utils.settings.scripts import ReplayConfig
from utils.training import Run, samples_of_update

_REPEAT = (
    "use the data, versions, threads and kind of device of the run's log, or find what has changed"
)


def verify(flags: ReplayConfig, ranks: Ranks, begin: Callable, recompute: Callable) -> None:
    """--verify: say and write which updates are equal; collective.

    `begin` and `recompute` are those of replay.py: the first builds the run of a folder as it was
    at its last checkpoint before an update, and the second computes up to an update. Raises
    UserError for the first update that differs from its digest or from a checkpoint, and for what
    is missing or malformed in the run.
    """
    folder = expand(flags.run)
    ranks.from_main(lambda: check_output(flags, "json", RESULT))
    saved, digests, parts = ranks.from_main(
        lambda: read_run(folder, f"{flags.verify}"), no_timeout=True
    )
    updates = []
    checkpoints = {}
    for first, last in parts.items():
        run = begin(folder, first + 1)
        problem = f"{folder}: updates {first + 1} to {last} cannot be computed; check its settings"
        require(run.state.step == first and last <= run.updates, problem)
        if first == 0 and (path := saved.pop(0, None)):
            check_start(run, path)
            checkpoints[path.name] = files_of(path)
        for _ in recompute(run, iter(run.train_batches), last):
            step = run.state.step
            if run.state.digest[-1:] != [digests.pop(step, None)]:
                raise difference(run, step, "digest", folder)
            if path := saved.pop(step, None):
                if file := changed(run, path):
                    raise difference(run, step, file, folder)
                checkpoints[path.name] = files_of(path)
        run.log.close()
        data = run.data.fingerprint
        del run
        leave_run()
        updates.append(f"{first + 1} to {last}")
    weights = join_names(checkpoints) or "none"
    others = join_names([*(path.name for path in saved.values()), *digests]) or "nothing"
    equal = f"equal in updates {join_names(updates)}, and in the weights of {weights}"
    say(f"{folder}: {equal}; not compared: {others}")
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


def read_run(folder: Path, text: str) -> tuple:
    """The checkpoints of a run, and the digests in its log and in them, by update; and the parts
    of the run that --verify `text` computes.

    Raises UserError for what is malformed or contradicts the rest.
    """
    records = read_log(folder)
    starts, trained = (
        [record["step"] for record in records if record["kind"] == kind]
        for kind in ("start", "train")
    )
    in_order = starts and trained == sorted({*trained})
    require(in_order, f"{folder}/log.jsonl: its records are not in order", "restore it")
    settings = vars(read_settings(folder))
    saved = beginnings(folder, records)
    for path in checkpoints_of(folder / "checkpoints"):
        there = read_checkpoint(path)
        step = there.state.step
        # earlier starts may have had other settings
        other = differing(vars(there.config), settings) if step > starts[-1] else []
        require(
            step == step_of(path) and not other,
            f"{path}: has update {step}, or other settings than config.yaml: {other}",
            "restore the run",
        )
        trained.append(step)
        records.append(vars(there.state))
    digests = digests_of(records)
    every = range(starts[0] + 1, max(starts + trained) + 1)
    return saved, digests, parts_to_compute(choose_updates(text, digests, every), saved)


def changed(run: Run, checkpoint: Path) -> str | None:
    """The first file of a checkpoint that differs from the run, or its damage; None if equal."""
    if found := damage_of(checkpoint):
        return found
    average = run.average.state_dict() if run.average else {}
    for file, own in ((WEIGHTS_FILE, distinct_state(run.module)), (EMA_FILE, average)):
        saved = read_weights(checkpoint / file) if file in files_of(checkpoint) else {}
        ours = map(own.__getitem__, saved)
        if saved.keys() != own.keys() or hash_tensors(saved.values()) != hash_tensors(ours):
            return f"{checkpoint / file}"
    return None


def check_start(run: Run, checkpoint: Path) -> None:
    """Raise UserError if the checkpoint of update 0 differs from the weights that a fitted head
    gives again.
    """
    file = changed(run, checkpoint)
    require(not file, f"{file}: differs from the weights at the start, computed again", _REPEAT)


def difference(run: Run, update: int, what: str, folder: Path) -> UserError:
    """The error that an update of the run in `folder` differs, with its samples, and with what has
    changed in the data since the run listed it.
    """
    problem = f"update {update} differs ({what}); its samples: "
    problem += join_names(samples_of_update(run, update - 1))
    try:
        load_data(run.config, read_checkpoint(find_checkpoint(folder)).table)
    except UserError as error:
        problem += f"; {error.problem}"
    return UserError(problem, _REPEAT)


def compare(flags: ReplayConfig, begin: Callable) -> None:
    """--against: say that the digests of two runs are equal; collective.

    Raises UserError for the first update that differs.
    """
    folder = expand(flags.run)
    one = digests_of(read_log(folder))
    other = digests_of(read_log(expand(f"{flags.against}")))
    common = one.keys() & other.keys()
    require(common, "the logs have no digests in common", "train both runs with --microbatches")
    if different := differing(one, other):
        run = begin(folder, max(one) + 1)
        raise difference(run, different[0], f"the first, from {flags.against}", folder)
    say(f"equal in {len(common)} updates")


def digests_of(records: Sequence[Mapping]) -> dict[int, str]:
    """The digest of each update, counted from 1, in records of a log and states of checkpoints.

    Raises UserError if they contradict each other, or begin before the first record.
    """
    found = {
        (record["step"] - earlier, digest)
        for record in records
        for earlier, digest in enumerate(reversed(record.get("digest", ())))
    }
    digests = dict(sorted(found))
    require(
        # none is from before the first record
        len(digests) == len(found) and not (digests and records[0]["step"] in digests),
        "the digests of the log and the checkpoints differ",
        "restore the run",
    )
    return digests


def differing(one: Mapping, other: Mapping) -> list[int]:
    """The keys that both have with different values, sorted."""
    return sorted(key for key in one.keys() & other.keys() if one[key] != other[key])


def choose_updates(text: str, known: Collection[int], every: range) -> list[int]:
    """The updates that --verify asks for, sorted.

    `known` are those with a digest, and `every` those of the whole run.
    """
    chosen: list = [int(name) if name.isdecimal() else name for name in text.split(",")]
    if text == "all":
        chosen = [*every[: len(known) + 1]]  # enough to find one without a digest
    if number := re.fullmatch(r"random:(\d+)", text):
        chosen = random.sample([*known], min(int(number[1]), len(known)))
    absent = join_names(update for update in chosen if update not in known)
    problem = f"no digests of updates {absent} are saved; only --microbatches writes them"
    fix = "use all, random:20 or numbers such as 40,41"
    if not known:
        fix = "start a new run with --microbatches"
    require(chosen and not absent, f"--verify {text}: {problem}", fix)
    return sorted({*chosen})


def parts_to_compute(updates: Iterable[int], starts: Iterable[int]) -> dict[int, int]:
    """{start: last update to compute from it}; a start is the nearest before an update, or 0.

    A start that is itself one of the updates is not used, so that its weights are compared.
    """
    known = {0, *starts} - {*updates}
    return {max(start for start in known if start < update): update for update in updates}
