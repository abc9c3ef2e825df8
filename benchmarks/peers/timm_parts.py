"""MNIST with timm's data set, loader and optimizer, as its train.py combines them.

    torchrun --nproc_per_node 2 benchmarks/peers/timm_parts.py --data DIR --processes 2 --epochs 2

DIR was made by mnist.py. All processes run on the CPU. timm's loader normalises a whole batch in
one operation. After each epoch, all processes evaluate the test images, and process 0 prints a line
of JSON.
"""

import torch
import torch.distributed as dist
from parts import MEAN, STD, Clock, batch_size, make_work, read_flags, shift_of
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision import transforms


def loaders(args):
    """timm's loaders of the training and the test images."""
    shared = {
        "input_size": (1, 28, 28),
        "mean": (MEAN,),
        "std": (STD,),
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,
        "device": torch.device("cpu"),
        "distributed": True,
    }
    sets = [create_dataset("torch/mnist", str(args.data), split) for split in ("train", "test")]
    how = {"is_training": True, "no_aug": True}
    train = create_loader(sets[0], batch_size=batch_size(args), **how, **shared)
    train.sampler.seed = args.seed
    if args.recipe == "lockstep":
        steps = [shift_of(args), train.dataset.transform]
        train.dataset.transform = transforms.Compose(steps)
    return train, create_loader(sets[1], batch_size=512, crop_pct=1.0, **shared)


def main() -> None:
    args = read_flags(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, test = loaders(args)
    model, optimizer, scheduler = make_work(args, train.dataset.data[::60])
    if args.recipe == "tutorial":
        optimizer = create_optimizer_v2(model, "momentum", lr=0.01, momentum=0, weight_decay=0)
    model = DistributedDataParallel(model)

    clock = Clock()
    for epoch in range(args.epochs):
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
        found = accuracy(model.module, test)
        if dist.get_rank() == 0:
            print(clock.line(epoch=epoch + 1, accuracy=found), flush=True)
    dist.destroy_process_group()


@torch.no_grad()
def accuracy(model: torch.nn.Module, tests) -> float:
    """The share of test images that are classified correctly, over all processes."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.long)
    for x, y in tests:
        counts += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
