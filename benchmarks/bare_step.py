"""The training step alone, on one batch that stays on the device, without data, loop or log. Prints
one JSON line.

    python benchmarks/bare_step.py                                        one process
    torchrun --nproc_per_node 2 benchmarks/bare_step.py --exchange ddp    two, with DDP

It is run by scaling.py and gpus.py. Network, optimizer and memory layout are those of train.py;
nothing else of Lockstep is used. With `--exchange none` the processes run side by side and do not
communicate while they are timed. With `data_parallel` one process uses all GPUs through
torch.nn.DataParallel. With `--library timm` network and optimizer are those of timm, and with
`--photos FOLDER` its loader reads the batches from an image folder.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import repeat

import torch
import torch.distributed as dist
from common import ROOT, parse_flags
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(ROOT))
from utils.data import InputSpec
from utils.memory import keep_freed_memory
from utils.models import build_model
from utils.settings.train import TrainConfig
from utils.training import build_optimizer

CLASSES = 10


def make_model(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network and its optimizer."""
    config = TrainConfig(model=args.model, lr=0.05, weight_decay=5e-4)
    if args.library == "timm":
        import timm
        from timm.optim import create_optimizer_v2

        model = timm.create_model(args.model, num_classes=CLASSES, in_chans=args.channels)
        model = model.to(device, memory_format=torch.channels_last)
        optimizer = create_optimizer_v2(
            model, "sgd", config.lr, config.weight_decay, config.momentum
        )
        return model, optimizer
    half = [0.5] * args.channels
    spec = InputSpec(args.image_size, args.image_size, args.channels, half, half)
    model = build_model(config, spec, classes=CLASSES).to(device)
    return model, build_optimizer(config, model)


def make_batches(args: argparse.Namespace, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """One batch on the device again and again, or timm's batches of photographs."""
    if args.photos:
        from timm.data import create_dataset, create_loader

        dataset = create_dataset("", root=args.photos, is_training=True)
        options = {"num_workers": args.num_workers, "device": device, "color_jitter": 0.0}
        loader = create_loader(
            dataset, args.image_size, args.batch_size, is_training=True, **options
        )
        while True:
            for images, labels in loader:
                yield images.contiguous(memory_format=torch.channels_last), labels
    shape = args.batch_size, args.channels, args.image_size, args.image_size
    images = torch.randn(shape, device=device)
    labels = torch.randint(CLASSES, (args.batch_size,), device=device)
    yield from repeat((images.contiguous(memory_format=torch.channels_last), labels))


def make_step(args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A function that does one update."""
    torch.manual_seed(0)
    model, optimizer = make_model(args, device)
    if args.exchange == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True
        )
    elif args.exchange == "data_parallel":
        model = nn.DataParallel(model)
    batches = iter(make_batches(args, device))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.mixed_precision)

    def step() -> None:
        images, labels = next(batches)
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
    args = parse_flags(
        __doc__,
        rounds=None,
        exchange=("none", "none, ddp or data_parallel"),
        batch_size=(128, "of each process"),
        mixed_precision=("no", "no, bf16 or fp16"),
        model=("mnist_cnn", "name of the model"),
        image_size=(28, "pixels of a side"),
        channels=(1, "of the images"),
        library=("lockstep", "lockstep or timm: of model and optimizer"),
        photos=(str, "an image folder for timm's loader"),
        num_workers=(4, "of timm's loader"),
        steps=(150, "timed updates"),
        warmup=(30, "updates before them"),
    )
    torch.set_num_threads(1)
    keep_freed_memory()
    cuda, processes = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
    torch.backends.cudnn.benchmark = True
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.set_float32_matmul_precision("high")  # as train.py does
        torch.cuda.set_device(device)
    if processes > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    step = make_step(args, device)
    timed(step, args.warmup, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # cuDNN has tried its kernels
    seconds = timed(step, args.steps, device)
    rate = torch.tensor([args.steps * args.batch_size / seconds], device=device)
    if processes > 1:
        dist.all_reduce(rate)  # the sum over the processes
    memory = torch.cuda.max_memory_allocated() if cuda else None
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({"images_per_second": rate.item(), "gpu_memory": memory}), flush=True)
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
