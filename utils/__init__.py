"""The parts of a training run, and what the other scripts share with it.

Importing any of them sets these variables, unless the user has set them. PyTorch reads the first
two when it is loaded, and the others for the first process group. Results do not change.

* OMP_WAIT_POLICY: OpenMP threads sleep while they wait for each other. By default they spin: if
  another program uses some of the cores, they take processor time from the thread that they wait
  for.
* TORCH_CPP_LOG_LEVEL: PyTorch's C++ code would print a stack trace for each connection that breaks
  when a process is killed. Errors are still raised, and reported in one line.
* TORCH_DIST_USE_NCCL2: the NCCL class that is the default since PyTorch 2.15 makes the backward
  pass wait for each exchange of gradients. It also connects before the settings of a resumed run
  are known, which is too late for --deterministic.
* TORCH_NCCL_ASYNC_ERROR_HANDLING: by default, an NCCL network error aborts the process. With 2
  (CleanUpOnly), the next collective should raise it, so that it is reported in one line; this has
  not been seen on a GPU.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a GOMP_SPINCOUNT of the user overrides it
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
