"""The training step alone, on one batch that stays on the device, without data, loop or log. Prints one JSON line.

    python benchmarks/bare_step.py                                          one process
    torchrun --nproc_per_node 2 benchmarks/bare_step.py --exchange ddp      two processes that average their gradients

It is run by scaling.py. Network, optimizer and memory layout are those of train.py; nothing else of Lockstep is used.
With `--exchange none` the processes run side by side and do not communicate while they are timed. With `data_parallel`
one process uses all GPUs through torch.nn.DataParallel.
"""

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from utils.config.settings import TrainConfig
from utils.data.spec import InputSpec
from utils.memory import keep_freed_memory
from utils.models.zoo import build_model
from utils.training.optim import build_optimizer

SPEC = InputSpec(height=28, width=28, channels=1, mean=[0.5], std=[0.5])  # MNIST's


def make_step(args: argparse.Namespace, device: torch.device):
    """A function that does one update on the resident batch."""
    config = TrainConfig(model="mnist_cnn", lr=0.05, weight_decay=5e-4)
    torch.manual_seed(0)
    model = build_model(config, SPEC, classes=10).to(device)
    optimizer = build_optimizer(config, model)
    if args.exchange == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    elif args.exchange == "data_parallel":
        model = nn.DataParallel(model)
    images = torch.randn(args.batch_size, SPEC.channels, SPEC.height, SPEC.width, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch_size,), device=device)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.mixed_precision)

    def step() -> None:
        with torch.autocast(device.type, half) if half else nullcontext():
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step, steps: int, device: torch.device) -> float:
    """The seconds that `steps` steps take; all processes start at the same time."""
    if dist.is_initialized():
        dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", choices=("none", "ddp", "data_parallel"), default="none")
    parser.add_argument("--batch_size", type=int, default=128, help="of each process (default: %(default)s)")
    parser.add_argument("--mixed_precision", choices=("no", "bf16", "fp16"), default="no")
    parser.add_argument("--steps", type=int, default=150, help="timed updates (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="updates before them (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    cuda, processes = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    torch.backends.cudnn.benchmark = True
    if cuda:
        torch.set_float32_matmul_precision("high")  # as train.py does
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if processes > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    step = make_step(args, device)
    timed(step, args.warmup, device)
    rate = torch.tensor([args.steps * args.batch_size / timed(step, args.steps, device)], device=device)
    if processes > 1:
        dist.all_reduce(rate)  # the sum over the processes
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({"images_per_second": rate.item()}), flush=True)
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
