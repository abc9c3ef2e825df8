"""Compare runs by the digests of their updates, which train records have with --microbatches.

A digest is a sum of the bits of the summed gradient and of the weights after the update, in hex
(`TreeGradients.add_digest`). It detects faults and changes, but it is not a signature.
"""

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from utils.config import require
from utils.console import join_names


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
    """The last update to compute from each start: the nearest before an update, or 0.

    A start after another update is passed by, so that its weights are compared.
    """
    known = {0, *starts} - {*updates}
    return {max(start for start in known if start < update): update for update in updates}
