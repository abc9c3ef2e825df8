"""Images per second of one core with strong augmentation: Lockstep, timm and torchvision in paired
rounds.

    python benchmarks/augmentation.py --photos FOLDER --json FILE    with train/CLASS/IMAGE.jpg
    python benchmarks/augmentation.py                                generated photographs

Every side runs in this process, without loader processes, with one thread, from stored data to
normalised batches.

* photographs: random crops of 224x224, half of them flipped, in batches of 32. Ours with
  TrivialAugment and with RandAugment; timm's `create_loader` with RandAugment (`rand-m9-mstd0.5`);
  torchvision's reference transforms with TrivialAugment.
* grey 28x28 and colour 32x32: shifted, flipped, a quarter of them erased, and mixed by Mixup, in
  batches of 256. Also with TrivialAugment. torchvision's transforms run on tensors.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from input_pipeline import (
    MEAN,
    STD,
    InMemory,
    Sides,
    ours,
    run_forms,
    split_of,
    theirs,
    timms,
)
from torchvision import datasets
from torchvision.transforms import v2

from utils.data import InputSpec, make_dataset, whole_split
from utils.settings.train import TrainConfig


def photographs(folder: Path) -> Sides:
    """The sides for photographs."""
    crop = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    normalise = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    transform = v2.Compose([*crop, v2.TrivialAugmentWide(), *normalise])
    spec, split, sides = InputSpec(224, 224, 3, MEAN, STD), split_of(folder), {}
    for name in ("trivialaugment", "randaugment"):
        config = TrainConfig(num_workers=0, flip=True, auto_augment=name)
        mine = make_dataset(split, spec, config, True, iter)
        sides[f"ours, {name}"] = ours(mine, spec, 32, config)
    sides["torchvision, TrivialAugment"] = theirs(datasets.ImageFolder(folder, transform), 32)
    if find_spec("timm"):
        sides["timm, rand-m9-mstd0.5"] = timms(folder, auto_augment="rand-m9-mstd0.5")
    return sides


def small(side: int, channels: int, auto_augment: str | None, count: int) -> Sides:
    """The sides for `count` small images; torchvision, which is slower, has at most 4,096."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, channels, side, side), np.uint8)
    spec = InputSpec(side, side, channels, MEAN[:channels], STD[:channels])
    config = TrainConfig(
        crop_padding=2, flip=True, random_erasing=0.25, mixup=0.2, auto_augment=auto_augment
    )
    split = whole_split("train", pixels, np.zeros(count), "made")
    mine = make_dataset(split, spec, config, True, iter)
    change = [v2.RandomCrop(side, padding=2), v2.RandomHorizontalFlip()]
    change += [v2.TrivialAugmentWide()] if auto_augment else []
    change += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(spec.mean, spec.std)]
    images = InMemory(list(torch.from_numpy(pixels[:4096])), [*change, v2.RandomErasing(0.25)])
    mixup = v2.MixUp(alpha=0.2, num_classes=10)

    def collate(samples: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.zeros(len(samples), dtype=torch.int64)
        return mixup(torch.stack([image for image, _ in samples]), labels)

    torchvision = theirs(images, 256, collate_fn=collate)
    return {"ours": ours(mine, spec, 256, config), "torchvision": torchvision}


def make_forms(made: Path, photos: Path) -> dict:
    forms = {"photographs": partial(photographs, photos)}
    for name, side, channels in (("grey 28x28", 28, 1), ("colour 32x32", 32, 3)):
        policy = partial(small, side, channels, "trivialaugment", 4_096)
        forms[f"{name}, erasing and Mixup"] = partial(small, side, channels, None, 50_000)
        forms[f"{name}, erasing, Mixup and TrivialAugment"] = policy
    return forms


main = partial(run_forms, __doc__, make_forms, "First over it", sort=False)

if __name__ == "__main__":
    main()
