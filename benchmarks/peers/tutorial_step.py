"""The training step alone: the tutorials' network on one batch that stays in memory.

    torchrun --nproc_per_node 2 benchmarks/peers/tutorial_step.py --processes 2

No images are loaded. The network is in channels last, which is the fastest layout of plain PyTorch,
and malloc keeps freed memory. The script times five stretches of 40 updates on the CPU, drops the
first, and takes the third lowest time of the other four. It prints the images per second of all
processes.
"""

import argparse
import ctypes
import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import TutorialNet
from torch.nn.parallel import DistributedDataParallel

UPDATES, BATCH = 40, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="how many train together")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(parameter, 2**30)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TutorialNet().to(memory_format=torch.channels_last)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(BATCH, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH,))
    seconds = []
    for _ in range(5):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(UPDATES):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        rate = args.processes * BATCH * UPDATES / sorted(seconds[1:])[2]
        print(json.dumps({"images_per_second": rate}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
