"""Compare an exported model with its checkpoint, on the same tensors and from image files."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from utils.data.order import BlockSampler
from utils.data.pipeline import make_dataset
from utils.data.selection import load_split
from utils.errors import USER_ERRORS, UserError, one_line, problem_of
from utils.export.loaded import Loaded, Probabilities
from utils.files import expand

TOLERANCE = 1e-5  # in probability
_IMAGES = 100  # evaluation images to compare
_BLOCK = 10


@dataclass
class Compared:
    """How an export differs from its checkpoint: largest differences in a probability, and numbers of images."""

    difference: float = 0.0  # on the same pixels: random ones, and those of evaluation images
    images: int = 0  # evaluation images whose pixels were compared
    files: int = 0  # of these, images that were also read from their files
    from_files: float = 0.0
    same: int = 0  # files with the same predictions
    reason: str = ""  # why nothing was read from files


@contextmanager
def refusing(loaded: Loaded, form: str) -> Iterator[None]:
    """Turn any error of an exporter, or of what it has written, into one UserError."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # exporters and runtimes raise errors of many classes
        problem = f"--to {form}: {loaded.saved.settings.model} cannot be exported ({one_line(error)[:160]})"
        raise UserError(problem, "use another form") from error


def probabilities(loaded: Loaded, images: np.ndarray) -> np.ndarray:
    """The probabilities of the checkpoint, float32 [n, outputs], of uint8 images [n, H, W, C]."""
    with torch.inference_mode():
        return Probabilities(loaded)(torch.from_numpy(images)).numpy()


def compare(
    loaded: Loaded, form: str, preprocess: Callable[..., Any], predict: Callable[[np.ndarray], np.ndarray]
) -> Compared:
    """Compare the functions of the card with the checkpoint. Raises ValueError if the same pixels differ by over 1e-5.

    The pixels are random ones, in batches of 1, 2 and 7 images, and those of up to 100 evaluation images, which are
    also read as files by `preprocess`. Data is not downloaded for this.
    """
    spec, random, found = loaded.spec, np.random.default_rng(0), Compared()
    for count in (1, 2, 7):
        images = random.integers(0, 256, (count, spec.height, spec.width, spec.channels), np.uint8)
        _check_same(loaded, form, predict, images, found)
    for pixels, encoded in _evaluation_images(loaded, found):
        expected = _check_same(loaded, form, predict, pixels, found)
        found.images += len(pixels)
        if not all(isinstance(raw, bytes) for raw in encoded):
            found.reason = f"the images of {loaded.saved.settings.data} are not files"
        if not found.reason:
            _compare_files(loaded, expected, encoded, preprocess, predict, found)
    return found


def _check_same(
    loaded: Loaded, form: str, predict: Callable[[np.ndarray], np.ndarray], images: np.ndarray, found: Compared
) -> np.ndarray:
    """The checkpoint's probabilities of these images. Raises ValueError if those of the export differ by over 1e-5."""
    expected, got = probabilities(loaded, images), predict(images)
    difference = float(np.abs(got - expected).max()) if got.shape == expected.shape else np.inf
    if not difference <= TOLERANCE:  # NaN is not
        what = f"probabilities that differ by {difference:.2g} from the checkpoint's"
        problem = f"--to {form}: {loaded.saved.settings.model} has {what}"
        raise UserError(problem, "use another form, and check that the weights are finite")
    found.difference = max(found.difference, difference)
    return expected


def _compare_files(
    loaded: Loaded,
    expected: np.ndarray,
    encoded: list[bytes],
    preprocess: Callable[..., Any],
    predict: Callable[[np.ndarray], np.ndarray],
    found: Compared,
) -> None:
    """Add to `found` how predictions from these files differ from those expected."""
    try:
        images = np.stack([preprocess(io.BytesIO(raw)) for raw in encoded])
    except Exception as error:  # Pillow raises errors of many classes
        found.reason = one_line(error)
        return
    got = predict(images)
    found.files += len(expected)
    found.from_files = max(found.from_files, float(np.abs(got - expected).max()))
    found.same += int((_predicted(loaded, got) == _predicted(loaded, expected)).all(1).sum())


def _evaluation_images(loaded: Loaded, found: Compared) -> Iterator[tuple[np.ndarray, list]]:
    """Blocks of evaluation images: their pixels, uint8 [n, H, W, C], and their files, if they have any.

    There are none if the data cannot be read; `found.reason` then says why.
    """
    settings = loaded.saved.settings
    if not expand(settings.data).exists():
        found.reason = f"the images of {settings.data} are not files on this machine"
        return
    size, most = [loaded.spec.height, loaded.spec.width], min(_IMAGES, settings.max_eval_samples or _IMAGES)
    config = replace(settings, image_size=size, eval_size=None, max_eval_samples=most)
    with TemporaryDirectory() as scratch:
        try:
            split = load_split(config, None, loaded.saved.class_names, True, loaded.saved.record)
            dataset = make_dataset(split, loaded.spec, replace(config, cache_dir=scratch), False, lambda items: items)
        except USER_ERRORS as error:
            found.reason = problem_of(error)
            return
        for block in BlockSampler(len(split), _BLOCK):
            batch = dataset.__getitems__(block)
            if "error" in batch:
                found.reason = problem_of(batch["error"])
                return
            if len(batch["images"]):
                yield batch["images"].numpy(), [split.images[int(split.rows[index])] for index in batch["indices"]]


def _predicted(loaded: Loaded, found: np.ndarray) -> np.ndarray:
    """The predicted class of each image, [n, 1], or the predicted classes, bool [n, outputs]."""
    if loaded.activation == "softmax":
        return found.argmax(1)[:, None]
    return found > loaded.saved.settings.threshold
