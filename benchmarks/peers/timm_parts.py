"""MNIST with timm's data set, loader and optimizer, as its train.py combines them.

    torchrun --nproc_per_node 2 benchmarks/peers/timm_parts.py --data DIR --processes 2 --epochs 2

DIR was made by mnist.py. timm's loader normalises each batch at once. After each epoch, process 0
evaluates the test images and prints a line of JSON.
"""

import os

import torch
import torch.distributed as dist
from parts import MEAN, STD, Clock, batch_size, make_work, read_flags, shift_of
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision import transforms


def loaders(args, device):
    """timm's loaders of the training and the test images."""
    shared = {
        "input_size": (1, 28, 28),
        "mean": (MEAN,),
        "std": (STD,),
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,
        "device": device,
    }
    sets = [create_dataset("torch/mnist", str(args.data), split) for split in ("train", "test")]
    how = {"is_training": True, "no_aug": True, "distributed": args.processes > 1}
    train = create_loader(sets[0], batch_size=batch_size(args), **how, **shared)
    if args.recipe == "lockstep":
        steps = [shift_of(args), train.dataset.transform]
        train.dataset.transform = transforms.Compose(steps)
    return train, create_loader(sets[1], batch_size=512, crop_pct=1.0, **shared)


def main() -> None:
    args = read_flags(__doc__)
    torch.set_num_threads(1)
    cuda, rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if args.processes > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    train, test = loaders(args, device)
    model, optimizer, scheduler = make_work(args, train.dataset.data[::60])
    model.to(device)
    if args.recipe == "tutorial":
        optimizer = create_optimizer_v2(model, "momentum", lr=0.01, momentum=0, weight_decay=0)
    plain = model
    if args.processes > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if cuda else None)

    clock = Clock()
    for epoch in range(args.epochs):
        if args.processes > 1:
            train.sampler.set_epoch(epoch)
        model.train()
        clock.start()
        seen = 0
        for update, (x, y) in enumerate(train, 1):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
            seen += len(y) * args.processes
            if update == args.updates:
                break
        clock.stop(seen)
        if rank == 0:
            print(clock.line(epoch=epoch + 1, accuracy=accuracy(plain, test)), flush=True)
    if args.processes > 1:
        dist.barrier()
        dist.destroy_process_group()


@torch.no_grad()
def accuracy(model: torch.nn.Module, tests) -> float:
    """The share of test images that are classified correctly."""
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in tests)
    return correct / len(tests.dataset)


if __name__ == "__main__":
    main()
