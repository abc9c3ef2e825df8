"""Images per second of one core, from stored data to normalised float batches: Lockstep and others
in paired rounds.

    python benchmarks/input_pipeline.py --photos FOLDER --json FILE    with train/CLASS/IMAGE.jpg
    python benchmarks/input_pipeline.py                                generated photographs

Every side runs in this process, without loader processes, with one thread.

* photographs: a random crop of 8 to 100 % of the area, resized to 224x224, bilinear and
  antialiased, half of them flipped, in batches of 32. torchvision runs with the two backends of its
  reference training, and with its own decoder. timm runs `create_loader` with its defaults, and
  without colour jitter. The bare decoder decodes from memory and does nothing else.
* large photographs: the same with generated photographs of 4000x3000 pixels, as of a camera.
* colour 32x32 and grey 28x28: decoded beforehand on all sides. Colour images are shifted by up to 4
  pixels and flipped, in batches of 256; grey ones are shifted by up to 2 pixels, in batches of 128.
  torchvision's transforms run on Pillow images and on tensors. With --data_on_device yes, our
  batches are drawn by index on the device, which is the CPU here.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
import torch
from common import ROOT, in_turns, over, parse_flags, report, spread, temporary
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, io
from torchvision.transforms import v2

sys.path.insert(0, str(ROOT))
from utils.data import (
    ArrayDataset,
    DeviceLoader,
    Files,
    InputSpec,
    PhotoDataset,
    Plan,
    Split,
    UpdateSampler,
    make_augmentation,
    make_loaders,
    whole_split,
)
from utils.memory import keep_freed_memory
from utils.settings.train import TrainConfig

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
DEVICE, THREADS = torch.device("cpu"), 1
Sides = dict[str, Callable[[], float]]  # each a pass over the images, in images per second


def rate(batches) -> float:
    """Images per second of one pass over the batches, whose first tensors are the images."""
    begun, count = time.perf_counter(), 0
    for images, *_ in batches:
        count += len(images)
    return count / (time.perf_counter() - begun)


def ours(dataset: Dataset, spec: InputSpec, batch_size: int, config: TrainConfig) -> Callable:
    """A pass over the batches of Lockstep."""
    plan = Plan(len(dataset), batch_size, microbatches=1, seed=0, in_pairs=config.mixes)
    sampler = UpdateSampler(plan, 1, plan.updates_per_epoch)
    (loader,) = make_loaders([(dataset, sampler)], config, THREADS, DEVICE)
    return partial(rate, DeviceLoader(loader, spec, config, DEVICE, training=True, outputs=10))


def theirs(dataset: Dataset, batch_size: int, **options) -> Callable:
    """A pass over the batches of a loader of PyTorch."""
    return partial(rate, DataLoader(dataset, batch_size, shuffle=True, **options))


def timms(folder: Path, **options) -> Callable:
    """A pass over the batches of timm's loader."""
    from timm.data import create_dataset, create_loader

    options |= {"num_workers": 0, "persistent_workers": False, "device": DEVICE}
    dataset = create_dataset("", root=folder, is_training=True)
    return partial(rate, create_loader(dataset, 224, 32, is_training=True, **options))


def split_of(folder: Path) -> Split:
    """All images of an image folder."""
    paths = [path for path, _ in datasets.ImageFolder(folder).samples]
    return whole_split("train", Files(paths), np.zeros(len(paths)), "made")


def photographs(folder: Path) -> Sides:
    """The sides for photographs."""
    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    change = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    pil, decode = datasets.folder.pil_loader, partial(io.decode_image, mode="RGB")
    references = {
        "torchvision, PIL backend": (pil, [*change, v2.PILToTensor(), *normalise]),
        "torchvision, tensor backend": (pil, [v2.PILToTensor(), *change, *normalise]),
        "torchvision, decode_image": (decode, [*change, *normalise]),
    }
    spec, config = InputSpec(224, 224, 3, MEAN, STD), TrainConfig(num_workers=0, flip=True)
    split, augmentation = split_of(folder), make_augmentation(config, spec, training=True)
    encoded = [io.read_file(path).clone() for path in split.images.paths]
    sides = {"ours": ours(PhotoDataset(split, spec, augmentation), spec, 32, config)}
    sides["bare decode_jpeg"] = lambda: rate([io.decode_jpeg(d, "RGB")[None]] for d in encoded)
    for name, (load, transforms) in references.items():
        dataset = datasets.ImageFolder(folder, v2.Compose(transforms), loader=load)
        sides[name] = theirs(dataset, 32)
    if find_spec("timm"):
        sides["timm"] = timms(folder)
        sides["timm without colour jitter"] = timms(folder, color_jitter=0.0)
    return sides


class InMemory(Dataset):
    """Decoded images with torchvision's transforms."""

    def __init__(self, images: list, transforms: list):
        self.images, self.transform = images, v2.Compose(transforms)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.transform(self.images[index]), 0


def small(side: int, channels: int, padding: int, batch_size: int, flip: bool) -> Sides:
    """The sides for small images: ours on 50,000 images, the others, which are slower, on fewer."""
    pixels = np.random.default_rng(0).integers(0, 256, (50_000, side, side, channels), np.uint8)
    spec = InputSpec(side, side, channels, MEAN[:channels], STD[:channels])
    config = TrainConfig(crop_padding=padding, flip=flip)
    some = pixels[: 16 * batch_size]
    change = [v2.RandomCrop(side, padding=padding)] + [v2.RandomHorizontalFlip()] * flip
    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(spec.mean, spec.std)]
    pictures = [Image.fromarray(image.squeeze()) for image in some]
    tensors = list(torch.from_numpy(some).permute(0, 3, 1, 2).contiguous())
    on_pil = InMemory(pictures, [*change, v2.PILToTensor(), *normalise])
    augmentation = make_augmentation(config, spec, training=True)
    mine = ArrayDataset(pixels, np.zeros(len(pixels), np.int64), augmentation)
    on_device = replace(mine)
    on_device.move(DEVICE)
    return {
        "ours": ours(mine, spec, batch_size, config),
        "ours, --data_on_device yes": ours(on_device, spec, batch_size, config),
        "torchvision, PIL backend": theirs(on_pil, batch_size),
        "torchvision, tensor backend": theirs(InMemory(tensors, [*change, *normalise]), batch_size),
    }


def make_photographs(
    folder: Path, width: int, height: int, noise: float, count: int = 64, classes: int = 1
) -> Path:
    """Make an image folder of pictures that JPEG compresses about as well as photographs; returns
    it.
    """
    random, size = np.random.default_rng(0), (width, height)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
        noisy = np.asarray(coarse.resize(size, Image.BICUBIC))
        noisy = noisy + random.normal(0, noise, (height, width, 1))
        file = folder / str(number % classes) / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, quality=92)
    return folder


def run_forms(
    doc: str, make: Callable[[Path, Path], dict[str, Callable[[], Sides]]], header: str, sort: bool
) -> None:
    """Run a benchmark of one core and print its table.

    `make` returns, given a folder for files and that of the photographs, a function for each form
    of data, which makes its sides. The first side is compared with the others. `sort`: the fastest
    comes first.
    """
    args = parse_flags(doc, rounds=7, photos=(Path, "an image folder; else it is generated"))
    rows, results = [], {}
    torch.set_num_threads(THREADS)
    keep_freed_memory()  # as in train.py; here it applies to all sides
    with temporary() as made:
        # The size of ImageNet photographs, about 110 kB each.
        photos = args.photos or make_photographs(made / "photographs", 500, 375, noise=12)
        for form, make_sides in make(made, photos).items():
            sides = make_sides()
            for side in sides.values():
                side()  # warms up
            first, found = next(iter(sides)), in_turns(sides, args.rounds)
            names = sorted(found, key=lambda name: -median(found[name])) if sort else found
            for name in names:
                compared = "" if name == first else over(found[first], found[name])
                rows.append([form, name, spread(found[name]), compared])
            results[form] = found
        report(args, ["Images", "Pipeline", "Images/s of one core", header], rows, results)


def make_forms(made: Path, photos: Path) -> dict[str, Callable[[], Sides]]:
    # The size of photographs of a camera, about 2 MB each.
    large = make_photographs(made / "large", 4000, 3000, noise=4, count=32)
    return {
        "photographs": partial(photographs, photos),
        "large photographs": partial(photographs, large),
        "colour 32x32": partial(small, 32, 3, 4, 256, flip=True),
        "grey 28x28": partial(small, 28, 1, 2, 128, flip=False),
    }


main = partial(run_forms, __doc__, make_forms, "Ours over it", sort=True)

if __name__ == "__main__":
    main()
