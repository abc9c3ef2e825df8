"""Load the data sets of tests, which are in the current folder, and evaluate runs on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import eval
from helpers.ranks import run_ranks
from helpers.training_runs import words
from utils.data.selection import load_data
from utils.data.splits import Data
from utils.settings.train import TrainConfig


def load(data="folder", **settings: Any) -> Data:
    """The data of a new run."""
    return load_data(TrainConfig(data=str(data), cache_dir="cache", **settings))


def error_of(data="folder", **settings: Any) -> str:
    """The line with which loading fails."""
    with pytest.raises((ValueError, OSError)) as caught:
        load(data, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sizes(data: Data) -> tuple[int, str, int]:
    """The number of training images, and the name and the number of images of the other split."""
    return len(data.train), data.evaluation.name, len(data.evaluation)


# Flags of a short run on few images: each update is logged, every third is saved.
RUN = ["--model_args", "{hidden: 8}"]
RUN += words("--model mlp --threads 1 --lr 0.01 --global_batch_size 12 --lr_schedule constant")
RUN += words("--log_every 1 --eval_every 9 --save_every 3")


def evaluated(*flags: str) -> tuple[dict, str]:
    """What eval.py returns for the best checkpoint of the run `run`, and prints."""
    (outcome,) = run_ranks(1, eval.main, ["--ckpt", "runs/run", *flags])
    assert outcome.code == 0, outcome.err
    return outcome.value, outcome.out


def invert(path: str | Path) -> None:
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
