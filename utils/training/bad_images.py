"""List unreadable images in the run folder, and agree across ranks on those that are found during a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.batches import Batches
from utils.data.check import refuse_bad
from utils.data.splits import Data, Split
from utils.files import write_file
from utils.ranks.ranks import Ranks

LIST = "bad_images.json"


def write_list(folder: Path, images: dict[str, str]) -> None:
    """Write the list, {path or index: reason}, to the run folder if there is anything to list. Call on one rank."""
    if images:
        write_file(folder / LIST, json.dumps(images, indent=1) + "\n")


def found_by_all(ranks: Ranks, batches: Batches) -> dict[int, str]:
    """The positions of images that any rank newly found to be unreadable, with the reasons; collective."""
    own = {str(position): reason for position, reason in batches.bad.items() if position not in batches.agreed_bad}
    found = {int(k): reason for text in ranks.gather_text(json.dumps(own)) for k, reason in json.loads(text).items()}
    batches.agreed_bad |= found.keys()
    return dict(sorted(found.items()))


def agree_on_bad(run: Any, split: Split, batches: Batches) -> list[int]:
    """Log and list the images that any rank of a run (train.py's) newly found to be unreadable; collective.

    Returns their positions. They add nothing to the updates that they belong to, on any number of processes.
    """
    found = found_by_all(run.ranks, batches)

    def tell() -> None:
        for reason in found.values():
            run.log.say(f"{reason}; left out from now on")
        named = {split.describe(position): reason for position, reason in found.items()}
        run.log.write("bad_images", step=run.state.step, split=split.name, images=list(named))
        run.data.bad_images.update(named)
        write_list(run.start.folder, run.data.bad_images)

    run.ranks.run_on_all(lambda: found and run.ranks.is_main and tell())
    return list(found)


def without_bad(split: Split, positions: list[int], config: TrainConfig) -> Split:
    """The split without these samples, which could not be read earlier; ValueError with --bad_images refuse."""
    rows = split.rows[np.asarray(positions, np.int64)].tolist()
    split = replace(split, bad={**split.bad, **dict.fromkeys(rows, "could not be read earlier in this run")})
    if config.bad_images == "refuse":
        refuse_bad(split)
    return split


def still_bad(data: Data, positions: list[int]) -> list[str]:
    """Add images that were found to be unreadable before a resume to the list; one line about them if there are any."""
    named = [data.train.describe(position) for position in positions]
    data.bad_images.update(dict.fromkeys(named, "could not be read earlier in this run"))
    text = f"{len(named)} images could not be read earlier in this run and stay left out: {join_names(named, 3)}"
    return [text] if named else []
