"""Load the data sets of tests, which are in the current folder."""

from typing import Any

import pytest

from utils.config.settings import TrainConfig
from utils.data.selection import load_data
from utils.data.splits import Data


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
