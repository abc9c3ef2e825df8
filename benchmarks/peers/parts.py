"""What the training scripts in this folder have in common: flags, networks, and the line that they
print after each epoch.

The scripts of this folder do not use Lockstep, with one exception: --recipe lockstep takes the
network and the optimizer of recipes/mnist_fast.yaml from it, so that all scripts train the same.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[2]
RECIPE = yaml.safe_load((ROOT / "recipes/mnist_fast.yaml").read_text())
MEAN = STD = 0.5
TRAINING_IMAGES = 60_000


class TutorialNet(nn.Module):
    """The network of PyTorch's MNIST tutorials: two convolutions, two linear layers, dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(64 * 5 * 5, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(F.dropout(x, training=self.training))


def read_flags(doc: str | None) -> argparse.Namespace:
    """The flags of all scripts in this folder; `doc` is the docstring of the script."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder made by mnist.py")
    parser.add_argument("--processes", type=int, default=2, help="how many train together")
    parser.add_argument("--epochs", type=int, default=1, help="how many (default: 1)")
    parser.add_argument("--recipe", choices=("tutorial", "lockstep"), default="tutorial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, help="end each epoch after this number of updates")
    parser.add_argument(
        "--num_workers", type=int, default=0, help="DataLoader workers of each process"
    )
    parser.add_argument("--decoded", action="store_true", help="decode all images beforehand")
    return parser.parse_args()


def batch_size(args: argparse.Namespace) -> int:
    """Images per process and batch: 128 in the tutorials; in the recipe, 128 for all processes."""
    return 128 if args.recipe == "tutorial" else RECIPE["global_batch_size"] // args.processes


def updates(args: argparse.Namespace) -> int:
    """How many updates an epoch has."""
    return args.updates or -(-TRAINING_IMAGES // (batch_size(args) * args.processes))


def make_work(
    args: argparse.Namespace, some_images: Tensor
) -> tuple[nn.Module, Optimizer, LRScheduler | None]:
    """The model, its optimizer, and a scheduler to step after each update, if there is one.

    `some_images` are training images, uint8 [n, 28, 28].
    """
    torch.manual_seed(args.seed)
    if args.recipe == "tutorial":
        model = TutorialNet()
        return model, SGD(model.parameters(), lr=0.01), None
    sys.path.insert(0, str(ROOT))
    from utils.data import InputSpec
    from utils.models import build_model
    from utils.settings.train import TrainConfig
    from utils.training import build_optimizer

    rate = RECIPE["lr"]
    network = {name: RECIPE[name] for name in ("model", "model_args")}
    config = TrainConfig(lr=rate, weight_decay=5e-4, **network)
    model = build_model(config, InputSpec(28, 28, 1, [MEAN], [STD]), classes=10)
    model.whiten_patches(np.asarray(some_images)[..., None])
    optimizer = build_optimizer(config, model)
    steps = args.epochs * updates(args)
    return model, optimizer, OneCycleLR(optimizer, rate, steps, cycle_momentum=False)


def shift_of(args: argparse.Namespace) -> nn.Module:
    """The augmentation of the recipe, a shift by up to one pixel; the tutorials have none."""
    if args.recipe == "tutorial":
        return nn.Identity()
    return transforms.RandomCrop(28, padding=RECIPE["crop_padding"])


def training_transform(args: argparse.Namespace) -> transforms.Compose:
    """Pillow image to augmented and normalised tensor."""
    return transforms.Compose([shift_of(args), *test_transform().transforms])


def test_transform() -> transforms.Compose:
    """Pillow image to normalised tensor."""
    return transforms.Compose([transforms.ToTensor(), transforms.Normalize([MEAN], [STD])])


class Clock:
    """The seconds of training alone, over all epochs."""

    def __init__(self):
        self.seconds = 0.0
        self.images = 0

    def start(self) -> None:
        self.begun = time.perf_counter()

    def stop(self, images: int) -> None:
        """End a stretch in which all processes together trained on `images` images."""
        self.seconds += time.perf_counter() - self.begun
        self.images += images

    def line(self, **more: float) -> str:
        """What a script prints after each epoch."""
        found = {"train_s": self.seconds, "images_per_second": self.images / self.seconds}
        return json.dumps(found | more)
