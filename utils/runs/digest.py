"""Compare runs by the digests of their updates, which train records have with --microbatches.

A digest is a sum of the bits of the summed gradient and of the weights after the update, in hex
(`TreeGradients.add_digest`). It detects faults and changes, but it is not a signature.
"""

import random
import re
from collections.abc import Iterable, Mapping

from utils.config.bounds import require
from utils.console import join_names


def digests_of(*records: Mapping) -> dict[int, str]:
    """The digest of each update, counted from 1, in records of a log."""
    return {
        record["step"] - earlier: digest
        for record in records
        for earlier, digest in enumerate(reversed(record.get("digest", ())))
    }


def differing(one: Mapping, other: Mapping) -> list[int]:
    """The keys that both have with different values, sorted."""
    return sorted(key for key in one.keys() & other.keys() if one[key] != other[key])


def choose_updates(text: str, known: Iterable[int], every: Iterable[int]) -> list[int]:
    """The updates that --verify asks for, sorted.

    `known` are those with a digest, and `every` those of the whole log.
    """
    updates = {str(update): update for update in known}
    names = [*map(str, every)] if text == "all" else text.split(",")
    if number := re.fullmatch(r"random:(\d+)", text):
        names = random.sample([*updates], min(int(number[1]), len(updates)))
    absent = join_names(name for name in names if name not in updates)
    problem = f"--verify {text}: the log has no digests {absent}, which only --microbatches gives"
    require(names and not absent, problem, "use all, random:20 or numbers such as 40,41")
    return sorted({updates[name] for name in names})


def parts_to_compute(updates: Iterable[int], starts: Iterable[int]) -> dict[int, int]:
    """The last update to compute from each start: the nearest before an update, or 0.

    A start after another update is passed by, so that its weights are compared.
    """
    known = {0, *starts} - {*updates}
    return {max(start for start in known if start < update): update for update in updates}
