"""Compare an exported model with its checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from utils.errors import UserError, one_line
from utils.export.loaded import Loaded, probabilities

TOLERANCE = 1e-5  # in probability


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


def compare(loaded: Loaded, form: str, predict: Callable[[np.ndarray], np.ndarray]) -> float:
    """The largest difference in a probability between `predict` of an export and the checkpoint.

    They are compared on random pixels, in batches of 1, 2 and 7 images. Raises ValueError if they differ by over 1e-5.
    """
    spec, random, worst = loaded.spec, np.random.default_rng(0), 0.0
    for count in (1, 2, 7):
        images = random.integers(0, 256, (count, spec.height, spec.width, spec.channels), np.uint8)
        expected, got = probabilities(loaded, images), predict(images)
        difference = float(np.abs(got - expected).max()) if got.shape == expected.shape else np.inf
        if not difference <= TOLERANCE:  # NaN is not
            what = f"probabilities that differ by {difference:.2g} from the checkpoint's"
            problem = f"--to {form}: {loaded.saved.settings.model} has {what}"
            raise UserError(problem, "use another form, and check that the weights are finite")
        worst = max(worst, difference)
    return worst
