"""Classify photographs with about forty lines of timm and scikit-learn; benchmarks/photos.py
compares train.py with it.

    python benchmarks/forty_lines.py --data FOLDER --weights FILE --model tf_efficientnet_lite0

FOLDER has train/CLASS/IMAGE and val/CLASS/IMAGE. Each photograph is read once, and the model
without its head computes its features. A logistic regression is fitted to the features of train/.
This file does not use Lockstep. The model runs with PyTorch's default number of threads. On many
CPUs, the model is faster with --channels_last.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder


def backbone(name: str, weights: Path) -> torch.nn.Module:
    """The model without its head, with the weights of a file, matched by order if their names are
    not timm's.
    """
    model = timm.create_model(name)
    source = (
        load_file(weights)
        if weights.suffix == ".safetensors"
        else torch.load(weights, weights_only=True)
    )
    if source.keys() != model.state_dict().keys():
        source = dict(zip(model.state_dict(), source.values(), strict=True))
    model.load_state_dict(source)
    model.reset_classifier(0)
    return model.eval()


@torch.inference_mode()
def features(model: torch.nn.Module, folder: Path, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """The features and labels of all photographs of a folder."""
    photographs = ImageFolder(
        folder, create_transform(**resolve_model_data_config(model), is_training=False)
    )
    batches = [
        (model(images), labels)
        for images, labels in DataLoader(photographs, 32, num_workers=workers)
    ]
    return tuple(torch.cat(parts).numpy() for parts in zip(*batches, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", required=True, help="with train/ and val/"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", required=True, help="a .safetensors or .pth file"
    )
    parser.add_argument("--model", metavar="NAME", required=True, help="a model of timm")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, default=cores, help="loader processes (default: one per core)"
    )
    parser.add_argument(
        "--channels_last", action="store_true", help="use this memory format for the model"
    )
    args = parser.parse_args()
    begun, model = time.perf_counter(), backbone(args.model, args.weights)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    (seen, classes), (unseen, truth) = (
        features(model, args.data / part, args.workers) for part in ("train", "val")
    )
    head = LogisticRegression(max_iter=10_000).fit(seen, classes)
    wrong, count = int((head.predict(unseen) != truth).sum()), len(truth)
    seconds = time.perf_counter() - begun
    print(
        json.dumps(
            {"accuracy": 1 - wrong / count, "wrong": wrong, "images": count, "seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()
