"""Images that turn out to be unreadable during a run: find them on all ranks, and list them in the run folder."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from utils.config.settings import TrainConfig
from utils.console import join_names
from utils.data.batches import Batches
from utils.data.check import refuse_bad
from utils.data.splits import Data, Split
from utils.files import write_file
from utils.ranks.ranks import Ranks

LIST = "bad_images.json"
_REASON = "could not be read earlier in this run"


def write_list(folder: Path, images: Mapping[str, str]) -> None:
    """Write {path or index: reason} to the run folder if there are bad images. Call on one rank."""
    if images:
        write_file(folder / LIST, json.dumps(dict(images), indent=1) + "\n")


def found_by_all(ranks: Ranks, batches: Batches) -> dict[int, str]:
    """Positions and reasons of images that any rank newly found to be unreadable; collective."""
    own = {str(position): reason for position, reason in batches.bad.items() if position not in batches.agreed_bad}
    found = {int(k): reason for text in ranks.gather_text(json.dumps(own)) for k, reason in json.loads(text).items()}
    batches.agreed_bad |= found.keys()
    return dict(sorted(found.items()))


def without_bad(split: Split, positions: list[int], config: TrainConfig) -> Split:
    """The split without samples that could not be read before a resume. Raises ValueError with --bad_images refuse."""
    rows = split.rows[np.asarray(positions, np.int64)].tolist()
    split = replace(split, bad={**split.bad, **dict.fromkeys(rows, _REASON)})
    if config.bad_images == "refuse":
        refuse_bad(split)
    return split


def still_bad(data: Data, positions: list[int]) -> list[str]:
    """Add images that could not be read before a resume to `data.bad_images`; returns a line about them, if any."""
    names = [data.train.describe(position) for position in positions]
    data.bad_images.update(dict.fromkeys(names, _REASON))
    text = f"{len(names)} images {_REASON} and are still left out: {join_names(names, 3)}"
    return [text] if names else []
