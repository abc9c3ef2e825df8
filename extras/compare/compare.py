"""The difference between two runs, or between two groups of runs with several seeds."""

import numpy as np
from scipy.stats import t

_EFFECT = 2.8  # standard errors (1.96 + 0.84), found with a chance of 80 %


def compare(samples: np.ndarray, images: int) -> tuple[float, float, str, str]:
    """Compare two runs by their differences, float [S, N], with S seeds on N of `images`, or on
    resamples of them; NaN where a seed lacks an image.

    Returns the mean difference, half of its 95 % interval, how many seeds or images were used, and
    with how many a difference of this size would be found with a chance of 80 %.

    With several seeds, both seeds and images are random, as in an analysis of variance with two
    crossed random factors. What two seeds have in common is due to the images. The variance is at
    least that over the images alone. If all values are -1, 0 and 1, each seed gets one more image,
    half for each run, so that the variance is above 0: with one seed, this is the interval of
    Agresti and Min (2005).
    """
    counts = np.isfinite(samples).sum(1)
    means = np.nanmean(samples, 1)
    centred = np.nan_to_num(samples.T - means) / (counts * (counts - 1)) ** 0.5
    covariance = centred.T @ centred
    if np.isin(np.nan_to_num(samples), (-1, 0, 1)).all():
        covariance += np.diag(1 / counts**2)
    seeds, mean, alone = len(means), means.mean(), covariance.mean()
    # the variance at which this difference would be found
    wanted = max((mean / _EFFECT) ** 2, 1e-30)
    half = 1.96 * alone**0.5
    if seeds == 1:
        return mean, half, f"{images:,} images", f"{images * alone / wanted:,.0f} images"
    between = means.var(ddof=1) / seeds
    shared = max(0.0, (seeds * alone - covariance.diagonal().mean()) / (seeds - 1))
    # Each part has its own quantile (Cochran, 1964). With the degrees of freedom of Satterthwaite,
    # the intervals of two or three seeds were too short.
    own = (between * t.ppf(0.975, seeds - 1) + shared * 1.96) / (between + shared + 1e-30) ** 0.5
    needed = f"{images * shared / wanted:,.0f} images"
    if wanted > shared:  # two seeds more, as the variance is not known
        needed = f"{seeds * between / (wanted - shared) + 2:,.0f} seeds"
    return mean, max(half, own), f"{seeds} seeds", needed
