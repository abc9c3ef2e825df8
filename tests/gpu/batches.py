"""Compare the batches of a loader on the CPU, of one on the GPU, and of images on the GPU. Prints
one JSON line.

It is run by test_speed_on_gpus.py. The argument is the device.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from utils.config.settings import TrainConfig
from utils.data.augment import make_augmentation
from utils.data.batches import DeviceLoader
from utils.data.datasets import CachedDataset, DeviceDataset
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.data.workers import make_loaders

config = TrainConfig(crop_padding=4, flip="alternate", random_erasing=0.5, cutout=8)
spec, device = InputSpec(32, 32, 3, [0.5] * 3, [0.25] * 3), torch.device(sys.argv[1])
pixels = np.random.default_rng(0).integers(0, 256, (4000, 32, 32, 3), np.uint8)
order = np.random.default_rng(1).permutation(4000)
microbatches = [
    Microbatch(0, 0, n, order[start : start + 256]) for n, start in enumerate(range(0, 4000, 256))
]
microbatches.append(Microbatch(1, 0, 0, order[:0]))


def read(place: torch.device, resident: bool) -> list[list[torch.Tensor]]:
    """The images and labels of all batches, on the CPU."""
    decoded = CachedDataset(pixels, np.arange(4000), make_augmentation(config, spec, training=True))
    dataset = DeviceDataset(decoded, place) if resident else decoded
    batches = DeviceLoader(
        make_loaders([(dataset, microbatches)], config, 1, place)[0],
        spec,
        config,
        place,
        training=True,
    )
    return [[batch.images.cpu(), batch.labels.cpu()] for batch in batches]


cpu, loaded, resident = read(torch.device("cpu"), False), read(device, False), read(device, True)
sides = {"loader": loaded, "on the device": resident}
apart = {
    name: max((a[0] - b[0]).abs().max().item() for a, b in zip(cpu, side, strict=True) if len(a[0]))
    for name, side in sides.items()
}
pairs = [pair for a, b in zip(loaded, resident, strict=True) for pair in zip(a, b, strict=True)]
same = len(loaded) == len(microbatches) and all(torch.equal(*pair) for pair in pairs)
labels = all(torch.equal(a[1], b[1]) for a, b in zip(cpu, loaded, strict=True))
print(json.dumps({"largest difference": apart, "both equal": same, "labels equal": labels}))
