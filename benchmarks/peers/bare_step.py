"""The training step alone: the tutorials' network on one batch that stays on the device.

    torchrun --nproc_per_node 2 benchmarks/peers/bare_step.py --processes 2

No images are loaded. The network is in channels last, which is the fastest layout of plain PyTorch,
and malloc keeps freed memory. The line of JSON has the images per second of all processes: the
third lowest time of five stretches of 40 updates, without the first stretch.
"""

import argparse
import ctypes
import json
import os
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
    cuda, rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = TutorialNet().to(device, memory_format=torch.channels_last)
    if args.processes > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
        ids = [rank] if cuda else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(BATCH, 1, 28, 28, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH,), device=device)
    seconds = []
    for _ in range(5):
        if args.processes > 1:
            dist.barrier()
        begun = time.perf_counter()
        for _ in range(UPDATES):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        rate = args.processes * BATCH * UPDATES / sorted(seconds[1:])[2]
        print(json.dumps({"images_per_second": rate}), flush=True)
    if args.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
