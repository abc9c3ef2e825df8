"""How much variance of a difference in accuracy is left if runs are paired by image and by seed.

    python benchmarks/pairing.py --one runs/A --other runs/B

runs/A-seed0, runs/B-seed0 and so on have a page.
Without pairs, the variance is the sum of those of A and B.
"""

import sys
from pathlib import Path

import numpy as np
from common import ROOT, parse_flags

sys.path.insert(0, str(ROOT))
from extras.compare.command import find_runs
from extras.page.page import PREDICTIONS


def main() -> None:
    flags = parse_flags(__doc__, ["one", "other"], None, one=(str, "A"), other=(str, "B"))
    groups = [
        [np.load(run / PREDICTIONS)["values"][:, 1] for run in find_runs(Path(name))]
        for name in (flags.one, flags.other)
    ]
    pairs = [*zip(*groups, strict=True)]
    images = np.mean([np.var(b - a) / (np.var(a) + np.var(b)) for a, b in pairs])
    of_a, of_b = ([run.mean() for run in runs] for runs in groups)
    seeds = np.var(np.subtract(of_b, of_a)) / (np.var(of_a) + np.var(of_b))
    print(f"left by pairs: images {images:.0%}, seeds {seeds:.0%} (of {len(pairs)} seeds)")


if __name__ == "__main__":
    main()
