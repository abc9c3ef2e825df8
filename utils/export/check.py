"""Compare an exported model with its checkpoint, on the same tensors and from image files."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from utils.data.order import BlockSampler
from utils.data.pipeline import make_dataset
from utils.data.selection import load_split
from utils.errors import USER_ERRORS, UserError, problem_of
from utils.export.loaded import Loaded, Probabilities
from utils.files import expand

TOLERANCE = 1e-5  # in probability
_IMAGES = 100  # evaluation images to compare
_BLOCK = 10


@dataclass(frozen=True)
class FromFiles:
    """Predictions from image files against those of the evaluation, or the reason why they were not compared.

    `count` images, the largest difference in a probability, and the number of images with the same prediction.
    """

    count: int = 0
    worst: float = 0.0
    same: int = 0
    reason: str = ""


def probabilities(loaded: Loaded, images: np.ndarray) -> np.ndarray:
    """The probabilities of the checkpoint, float32 [n, outputs], of uint8 images [n, H, W, C]."""
    with torch.inference_mode():
        return Probabilities(loaded)(torch.from_numpy(images)).numpy()


def check_same(loaded: Loaded, predict: Callable[[np.ndarray], np.ndarray], form: str) -> float:
    """The largest difference in a probability on batches of 1, 2 and 7 images. Raises ValueError above 1e-5."""
    spec, random, worst = loaded.spec, np.random.default_rng(0), 0.0
    for count in (1, 2, 7):
        images = random.integers(0, 256, (count, spec.height, spec.width, spec.channels), np.uint8)
        expected, found = probabilities(loaded, images), predict(images)
        different = found.shape != expected.shape
        difference = np.inf if different else float(np.abs(found - expected).max())
        if not difference <= TOLERANCE:  # NaN is not
            what = f"probabilities that differ by {difference:.2g} from the checkpoint's"
            problem = f"--to {form}: {loaded.saved.settings.model} has {what}"
            raise UserError(problem, "use another form, and check that the weights are finite")
        worst = max(worst, difference)
    return worst


def compare_files(loaded: Loaded, preprocess: Callable[..., Any], predict: Callable[..., Any]) -> FromFiles:
    """Compare predictions from files, read by `preprocess`, with those of the evaluation, for up to 100 images.

    Nothing is downloaded for this.
    """
    settings = loaded.saved.settings
    if not expand(settings.data).exists():
        return FromFiles(reason=f"the images of {settings.data} are not files on this machine")
    size = [loaded.spec.height, loaded.spec.width]
    config = replace(settings, image_size=size, eval_size=None, max_eval_samples=_IMAGES)
    try:
        split = load_split(config, None, loaded.saved.class_names, True, loaded.saved.record)
        with TemporaryDirectory() as scratch:
            dataset = make_dataset(split, loaded.spec, replace(config, cache_dir=scratch), False, lambda items: items)
            worst, same, count = 0.0, 0, 0
            for block in BlockSampler(len(split), _BLOCK):
                batch = dataset.__getitems__(block)
                if "error" in batch:
                    raise batch["error"]
                encoded = [split.images[int(split.rows[index])] for index in batch["indices"]]
                if not all(isinstance(raw, bytes) for raw in encoded):
                    return FromFiles(reason=f"the images of {settings.data} are not files")
                expected = probabilities(loaded, batch["images"].numpy())
                found = predict(np.stack([preprocess(io.BytesIO(raw)) for raw in encoded]))
                worst = max(worst, float(np.abs(found - expected).max()))
                same += int((_predicted(loaded, found) == _predicted(loaded, expected)).all(1).sum())
                count += len(expected)
    except USER_ERRORS as error:
        return FromFiles(reason=problem_of(error))
    return FromFiles(count, worst, same)


def _predicted(loaded: Loaded, found: np.ndarray) -> np.ndarray:
    """The predicted class of each image, [n, 1], or the predicted classes, bool [n, outputs]."""
    if loaded.activation == "softmax":
        return found.argmax(1)[:, None]
    return found > loaded.saved.settings.threshold
