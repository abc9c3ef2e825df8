"""Images per second of one core with strong augmentation: Lockstep, timm and torchvision in paired
rounds.

    python benchmarks/augmentation.py --photos FOLDER --json FILE       an image folder, train/CLASS/IMAGE.jpg
    python benchmarks/augmentation.py                                   generated photographs

Every side runs in this process, without loader processes, with one thread, from stored data to
normalised batches.

* photographs: random crops of 224x224, half of them flipped, in batches of 32. Ours with TrivialAugment and with
  RandAugment; timm's `create_loader` with RandAugment (`rand-m9-mstd0.5`); torchvision's reference
  transforms with TrivialAugment.
* grey 28x28 and colour 32x32: shifted, flipped, a quarter of them erased, and mixed by Mixup, in batches of 256. Also
  with TrivialAugment. torchvision's transforms run on tensors.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from common import make_parser, ratios, report, spread
from input_pipeline import DEVICE, MEAN, STD, InMemory, in_forms, make_photographs, ours, rate
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from utils.config.settings import TrainConfig
from utils.data.cache import make_dataset
from utils.data.spec import InputSpec
from utils.data.splits import Files, whole_split
from utils.memory import keep_freed_memory

Sides = dict[str, Callable[[], float]]


def photographs(folder: str) -> Sides:
    """The sides for photographs; the first one is compared with the others."""
    crop = [
        v2.RandomResizedCrop(224, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.TrivialAugmentWide(),
    ]
    normalise = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    dataset = datasets.ImageFolder(folder, v2.Compose([*crop, *normalise]))
    paths, spec = [path for path, _ in dataset.samples], InputSpec(224, 224, 3, MEAN, STD)
    split, sides = whole_split("train", Files(paths), np.zeros(len(paths)), "made"), {}
    for name in ("trivialaugment", "randaugment"):
        config = TrainConfig(num_workers=0, flip=True, auto_augment=name)
        mine = make_dataset(split, spec, config, True, iter)
        sides[f"ours, {name}"] = partial(rate, ours(mine, spec, 32, config))
    sides["torchvision, TrivialAugment"] = partial(rate, DataLoader(dataset, 32, shuffle=True))
    try:
        from timm.data import create_dataset, create_loader
    except ImportError:
        return sides
    options = {
        "auto_augment": "rand-m9-mstd0.5",
        "num_workers": 0,
        "persistent_workers": False,
        "device": DEVICE,
    }
    theirs = create_dataset("", root=folder, is_training=True)
    loader = create_loader(theirs, 224, 32, is_training=True, **options)
    return sides | {"timm, rand-m9-mstd0.5": partial(rate, loader)}


def small(side: int, channels: int, auto_augment: str | None, count: int) -> Sides:
    """The sides for `count` small images; torchvision, which is slower, has at most 4,096."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, channels), np.uint8)
    spec = InputSpec(side, side, channels, MEAN[:channels], STD[:channels])
    config = TrainConfig(
        crop_padding=2, flip=True, random_erasing=0.25, mixup=0.2, auto_augment=auto_augment
    )
    split = whole_split("train", pixels.transpose(0, 3, 1, 2), np.zeros(count), "made")
    mine = make_dataset(split, spec, config, True, iter)
    change = [v2.RandomCrop(side, padding=2), v2.RandomHorizontalFlip()]
    change += [v2.TrivialAugmentWide()] if auto_augment else []
    normalise = [
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(spec.mean, spec.std),
        v2.RandomErasing(0.25),
    ]
    theirs = InMemory(
        list(torch.from_numpy(pixels[:4096]).permute(0, 3, 1, 2).contiguous()),
        [*change, *normalise],
    )
    mixup = v2.MixUp(alpha=0.2, num_classes=10)

    def collate(images: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return mixup(
            torch.stack([image for image, *_ in images]),
            torch.zeros(len(images), dtype=torch.int64),
        )

    sides = {"ours": partial(rate, ours(mine, spec, 256, config))}
    return sides | {
        "torchvision": partial(rate, DataLoader(theirs, 256, shuffle=True, collate_fn=collate))
    }


def table(form: str, results: dict[str, list[float]]) -> list[list[str]]:
    """A row for each side; the first one is compared with the others."""
    first, *_ = results.values()
    over = {
        name: "" if rates is first else spread(ratios(first, rates), ".2f")
        for name, rates in results.items()
    }
    return [[form, name, spread(rates), over[name]] for name, rates in results.items()]


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument(
        "--photos",
        metavar="FOLDER",
        help="photographs as an image folder (default: generated ones)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in train.py; here it applies to all sides
    with TemporaryDirectory(prefix="lockstep-") as made:
        folder = args.photos or make_photographs(Path(made) / "photos", 500, 375, 8.0)
        forms = {"photographs": partial(photographs, folder)}
        for name, side, channels in (("grey 28x28", 28, 1), ("colour 32x32", 32, 3)):
            forms[f"{name}, erasing and Mixup"] = partial(small, side, channels, None, 50_000)
            forms[f"{name}, erasing, Mixup and TrivialAugment"] = partial(
                small, side, channels, "trivialaugment", 4_096
            )
        rows, results = in_forms(forms, args.rounds, table)
        report(args, ["Images", "Pipeline", "Images/s of one core", "First over it"], rows, results)


if __name__ == "__main__":
    main()
