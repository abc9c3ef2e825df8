"""train.py with a check in its updates:

`LOCKSTEP_WATCHED=sync` or `raise`, for the tests in tests/gpu/.
"""

import os
import sys
from pathlib import Path

# instead of this folder, so that `train` is the project's
sys.path[0] = str(Path(__file__).parents[3])

import torch  # noqa: E402

import train  # noqa: E402

update, mode = train.train_update, os.environ["LOCKSTEP_WATCHED"]


def watched(run, batches):
    """One update. From the 6th to the 40th, a wait of the host for the GPU is an error."""
    step = run.state.step + 1
    if mode == "raise" and step == 30 and run.ranks.topology.rank == 1:
        raise RuntimeError("planted")
    check = mode == "sync" and 6 <= step <= 40 and run.accelerator.device.type == "cuda"
    if check:
        torch.cuda.set_sync_debug_mode("error")
    update(run, batches)
    if check:
        torch.cuda.set_sync_debug_mode("default")


train.train_update = watched
if __name__ == "__main__":
    train.main()
