"""Images per second of one core, from stored data to normalised float batches: Lockstep and others
in paired rounds.

    python benchmarks/input_pipeline.py --photos FOLDER --json FILE       an image folder, train/CLASS/IMAGE.jpg
    python benchmarks/input_pipeline.py                                   generated photographs

Every side runs in this process, without loader processes, with one thread.

* photographs: a random crop of 8 to 100 % of the area, resized to 224x224, bilinear and antialiased, half of them
  flipped, in batches of 32. torchvision runs with the two backends of its reference training, and
  with its own decoder. timm runs `create_loader` with its defaults, and without colour jitter. The
  bare decoder decodes from memory and does nothing else.
* large photographs: the same with generated photographs of 4000x3000 pixels, the size of camera photographs.
* colour 32x32 and grey 28x28: decoded beforehand on all sides. Colour images are shifted by up to 4 pixels and flipped,
  in batches of 256; grey ones are shifted by up to 2 pixels, in batches of 128. torchvision's
  transforms run on Pillow images and on tensors. With --data_on_device yes, our batches are drawn
  by index on the device, which is the CPU here.

A ratio is ours divided by theirs in the same round. A cell is the median of the rounds, with their
range.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from common import ROOT, in_turns, make_parser, ratios, report, spread
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, io
from torchvision.transforms import v2

sys.path.insert(0, str(ROOT))
from utils.config.settings import TrainConfig
from utils.data.augment import make_augmentation
from utils.data.batches import Batches
from utils.data.datasets import DecodedImages, EncodedImages, ResidentImages
from utils.data.order import Plan, UpdateSampler
from utils.data.spec import InputSpec
from utils.data.splits import Files, whole_split
from utils.data.workers import make_loaders
from utils.memory import keep_freed_memory

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
DEVICE, THREADS = torch.device("cpu"), 1
OURS, ON_DEVICE, BARE = "ours", "ours, --data_on_device yes", "bare decode_jpeg"


def rate(batches) -> float:
    """Images per second of one pass over the batches, whose first tensors are the images."""
    begun, count = time.perf_counter(), 0
    for images, *_ in batches:
        count += len(images)
    return count / (time.perf_counter() - begun)


def ours(dataset: Dataset, spec: InputSpec, batch_size: int, config: TrainConfig) -> Batches:
    plan = Plan(len(dataset), batch_size, microbatches=1, seed=0, in_pairs=config.mixes)
    loader = make_loaders(
        [(dataset, UpdateSampler(plan, 1, plan.updates_per_epoch))], config, THREADS, DEVICE
    )[0]
    return Batches(loader, spec, config, DEVICE, training=True, outputs=10)


def photographs(folder: str) -> dict[str, Callable[[], float]]:
    """The sides for photographs: a pass over all of them, in images per second."""
    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    change = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    references = {
        "torchvision, PIL backend": (
            datasets.folder.pil_loader,
            [*change, v2.PILToTensor(), *normalise],
        ),
        "torchvision, tensor backend": (
            datasets.folder.pil_loader,
            [v2.PILToTensor(), *change, *normalise],
        ),
        "torchvision, decode_image": (partial(io.decode_image, mode="RGB"), [*change, *normalise]),
    }
    sides = {}
    for name, (load, transforms) in references.items():
        dataset = datasets.ImageFolder(folder, v2.Compose(transforms), loader=load)
        sides[name] = partial(rate, DataLoader(dataset, 32, shuffle=True))
    paths = [path for path, _ in dataset.samples]
    spec, config = InputSpec(224, 224, 3, MEAN, STD), TrainConfig(num_workers=0, flip=True)
    split = whole_split("train", Files(paths), np.zeros(len(paths)), "made")
    mine = EncodedImages(split, spec, make_augmentation(config, spec, training=True))
    sides[OURS] = partial(rate, ours(mine, spec, 32, config))
    encoded = [io.read_file(path).clone() for path in paths]
    sides[BARE] = lambda: rate([io.decode_jpeg(data, "RGB")[None]] for data in encoded)
    return sides | timm_sides(folder)


def timm_sides(folder: str) -> dict[str, Callable[[], float]]:
    """timm's loader with and without colour jitter, if timm is installed."""
    try:
        from timm.data import create_dataset, create_loader
    except ImportError:
        return {}
    sides = {}
    for name, jitter in (("timm", 0.4), ("timm without colour jitter", 0.0)):
        options = {
            "color_jitter": jitter,
            "num_workers": 0,
            "persistent_workers": False,
            "device": DEVICE,
        }
        dataset = create_dataset("", root=folder, is_training=True)
        sides[name] = partial(rate, create_loader(dataset, 224, 32, is_training=True, **options))
    return sides


class InMemory(Dataset):
    """Decoded images with torchvision's transforms."""

    def __init__(self, images: list, transforms: list):
        self.images, self.transform = images, v2.Compose(transforms)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.transform(self.images[index]), 0


def small(
    side: int, channels: int, padding: int, batch_size: int, flip: bool
) -> dict[str, Callable[[], float]]:
    """The sides for small images: ours on 50,000 images, the others, which are slower, on fewer."""
    pixels = np.random.default_rng(0).integers(0, 256, (50_000, side, side, channels), np.uint8)
    spec = InputSpec(side, side, channels, MEAN[:channels], STD[:channels])
    config = TrainConfig(crop_padding=padding, flip=flip)
    some = pixels[: 16 * batch_size]
    change = [v2.RandomCrop(side, padding=padding)] + [v2.RandomHorizontalFlip()] * flip
    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(spec.mean, spec.std)]
    pictures = [Image.fromarray(image.squeeze()) for image in some]
    tensors = list(torch.from_numpy(some).permute(0, 3, 1, 2).contiguous())
    sides = {
        "torchvision, PIL backend": InMemory(pictures, [*change, v2.PILToTensor(), *normalise]),
        "torchvision, tensor backend": InMemory(tensors, [*change, *normalise]),
    }
    sides = {
        name: partial(rate, DataLoader(dataset, batch_size, shuffle=True))
        for name, dataset in sides.items()
    }
    augmentation = make_augmentation(config, spec, training=True)
    mine = DecodedImages(pixels, np.zeros(len(pixels), np.int64), augmentation)
    sides[ON_DEVICE] = partial(rate, ours(ResidentImages(mine, DEVICE), spec, batch_size, config))
    return sides | {OURS: partial(rate, ours(mine, spec, batch_size, config))}


def make_photographs(folder: Path, width: int, height: int, noise: float, count: int = 64) -> str:
    """Make an image folder of pictures that JPEG compresses about as well as photographs; returns
    its path.
    """
    random = np.random.default_rng(0)
    (folder / "class").mkdir(parents=True)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (width, height), Image.BICUBIC
        )
        noisy = np.asarray(coarse) + random.normal(0, noise, (height, width, 1))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(
            folder / "class" / f"{number}.jpg", quality=92
        )
    return str(folder)


def table(form: str, results: dict[str, list[float]]) -> list[list[str]]:
    """A row for each side of one kind of data, the fastest first."""
    order = sorted(results, key=lambda name: -sorted(results[name])[len(results[name]) // 2])
    against = {
        name: "" if name == OURS else spread(ratios(results[OURS], results[name]), ".2f")
        for name in order
    }
    return [[form, name, spread(results[name]), against[name]] for name in order]


def measure(made: Path, args: argparse.Namespace) -> None:
    # The sizes of ImageNet photographs, about 110 kB each, and of camera photographs, about 2 MB
    # each.
    folder = args.photos or make_photographs(made / "photographs", 500, 375, noise=12)
    large = make_photographs(made / "large", 4000, 3000, noise=4, count=32)
    forms = {
        "photographs": partial(photographs, folder),
        "large photographs": partial(photographs, large),
        "colour 32x32": partial(small, 32, 3, 4, 256, flip=True),
        "grey 28x28": partial(small, 28, 1, 2, 128, flip=False),
    }
    rows, results = in_forms(forms, args.rounds, table)
    report(args, ["Images", "Pipeline", "Images/s of one core", "Ours over it"], rows, results)


def in_forms(
    forms: dict[str, Callable], rounds: int, table: Callable
) -> tuple[list[list], dict[str, dict]]:
    """The rows of `table` and the rates of each form's sides, each of which runs once before to
    warm up.
    """
    rows, results = [], {}
    for form, make in forms.items():
        sides = make()
        for side in sides.values():
            side()
        results[form] = in_turns(sides, rounds)
        rows += table(form, results[form])
    return rows, results


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
        measure(Path(made), args)


if __name__ == "__main__":
    main()
