"""The parts of a training run.

Importing any of them sets OMP_WAIT_POLICY=passive, unless the user has set it. OpenMP reads it when
PyTorch is loaded. OpenMP threads then sleep while they wait for each other. By default they spin:
if another program uses some of the cores, they take processor time from the thread that they wait
for. Results do not change.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a GOMP_SPINCOUNT of the user overrides it
