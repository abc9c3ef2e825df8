"""Run one of two NCCL ranks, on separate GPUs or a shared one, and time its collectives.

They are all_reduce of several sizes, and the exchange of --microbatches. Rank 0 prints the times in
ms as one JSON line. It is run by test_smoke_on_gpus.py. Without a GPU the ranks use gloo.
"""

import json
import os
import time

import torch
import torch.distributed as dist

SIZES = {"4 B": 1, "4 KB": 2**10, "1 MB": 2**18, "25 MB": 25 * 2**18}  # in float32


def main() -> None:
    gpus, rank = torch.cuda.device_count(), int(os.environ["RANK"])
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    found = {}
    for name, size in SIZES.items():
        values, seconds = torch.full((size,), float(rank + 1), device=device), []
        for expected in (3, 6, 12, 24):
            begun = time.perf_counter()
            dist.all_reduce(values)
            assert (values[0].item(), values[-1].item()) == (expected, expected)
            seconds.append(time.perf_counter() - begun)
        found[name] = round(1e3 * min(seconds[1:]), 2)  # the first one connects
    exchange(device, rank)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found), flush=True)


def exchange(device: torch.device, rank: int) -> None:
    """Run the collectives of --microbatches for more than two partial sums (GPUs only)."""
    if device.type == "cuda":
        got = torch.empty(6, device=device)
        dist.all_to_all_single(got, torch.arange(6.0, device=device))
        dist.all_gather_into_tensor(torch.empty(12, device=device), got)
        assert got.tolist() == [3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2] * 2


if __name__ == "__main__":
    main()
