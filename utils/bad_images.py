"""List unreadable images in the run folder, and agree across ranks on those that are found during a run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.config import TrainConfig
from utils.data.check import refuse_bad
from utils.data.loader import Batches
from utils.data.splits import Split
from utils.distributed import Ranks
from utils.files import read_json, write_file
from utils.report import RunLog

LIST = "bad_images.json"


def keep_list(folder: Path, images: dict[str, str]) -> None:
    """Add images, {path or index: reason}, to the list in the run folder. Call on one rank."""
    if images:
        path = folder / LIST
        known = read_json(path) if path.exists() else {}
        write_file(path, json.dumps({**known, **images}, indent=1) + "\n")


def agree_on_bad(ranks: Ranks, log: RunLog, folder: Path, split: Split, batches: Batches, step: int) -> list[int]:
    """Log and list the images that any rank newly found to be unreadable, and return their positions; collective.

    They add nothing to the updates that they belong to, on any number of processes.
    """
    own = {str(position): reason for position, reason in batches.bad.items() if position not in batches.told}
    found = {int(k): reason for text in ranks.gather(json.dumps(own)) for k, reason in json.loads(text).items()}
    batches.told |= found.keys()

    def tell() -> None:
        named = {split.describe(position): found[position] for position in sorted(found)}
        for reason in named.values():
            log.say(f"{reason}; left out from now on")
        log.write("bad_images", step=step, split=split.name, images=list(named))
        keep_list(folder, named)

    ranks.together(lambda: ranks.is_main and tell())
    return sorted(found)


def without_bad(split: Split, positions: list[int], config: TrainConfig) -> Split:
    """The split without these samples, which could not be read earlier; ValueError with --bad_images refuse."""
    rows = split.rows[np.asarray(positions, np.int64)].tolist()
    split = replace(split, bad={**split.bad, **dict.fromkeys(rows, "could not be read earlier in this run")})
    if config.bad_images == "refuse":
        refuse_bad(split)
    return split
