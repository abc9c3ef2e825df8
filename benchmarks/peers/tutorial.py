"""MNIST with plain DistributedDataParallel, as in PyTorch's tutorials.

    python benchmarks/peers/tutorial.py --data DIR --processes 2 --epochs 2

DIR was made by mnist.py. All processes run on the CPU. After each epoch, process 0 evaluates the
test images, as the tutorials do, and prints a line of JSON.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from parts import Clock, batch_size, make_work, read_flags, test_transform, training_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST


def train(rank: int, args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    images = MNIST(args.data, train=True, transform=training_transform(args))
    sampler = DistributedSampler(images, seed=args.seed)
    loader = DataLoader(images, batch_size(args), sampler=sampler, num_workers=args.num_workers)
    tests = DataLoader(MNIST(args.data, train=False, transform=test_transform()), batch_size=512)
    model, optimizer, scheduler = make_work(args, images.data[::60])
    model = DistributedDataParallel(model)

    clock = Clock()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        clock.start()
        seen = 0
        for update, (x, y) in enumerate(loader, 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
            seen += len(y) * args.processes
            if update == args.updates:
                break
        clock.stop(seen)
        if rank == 0:
            line = clock.line(epoch=epoch + 1, accuracy=accuracy(model.module, tests))
            print(line, flush=True)
    dist.destroy_process_group()


@torch.no_grad()
def accuracy(model: torch.nn.Module, tests: DataLoader) -> float:
    """The share of test images that are classified correctly."""
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in tests)
    return correct / len(tests.dataset)


if __name__ == "__main__":
    flags = read_flags(__doc__)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    mp.spawn(train, args=(flags,), nprocs=flags.processes)
