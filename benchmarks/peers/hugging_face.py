"""MNIST in the style of Hugging Face's examples: datasets with a transform, and Accelerate.

    accelerate launch --config_file accelerate_configs/2cpu.yaml benchmarks/peers/hugging_face.py \\
        --data DIR --epochs 2

DIR was made by mnist.py. All processes run on the CPU. As in
run_image_classification_no_trainer.py, a PNG file is decoded each time that it is used. With
--decoded, each is decoded once, before training starts. After each epoch, all processes evaluate
the test images, and the main process prints a line of JSON.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import load_dataset
from parts import (
    MEAN,
    STD,
    Clock,
    batch_size,
    make_work,
    read_flags,
    shift_of,
    test_transform,
    training_transform,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2.functional import pil_to_tensor


def collate(rows):
    return torch.stack([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


def collate_decoded(rows):
    """Normalise a whole batch in one operation, which is faster than image by image."""
    images, labels = zip(*rows, strict=True)
    x = torch.stack(images).float().div_(255).sub_(MEAN).div_(STD)
    return x, torch.stack(labels)


class Decoded(TensorDataset):
    """The images of a split in memory, uint8 [n, 1, 28, 28], and their labels."""

    def __init__(self, split, transform):
        images = torch.stack([pil_to_tensor(row["image"]) for row in split])
        super().__init__(images, torch.tensor(split["label"]))
        self.transform = transform

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return self.transform(image), label


def make_loader(split, transform, shift, size, args, shuffle=False) -> DataLoader:
    options = {"batch_size": size, "shuffle": shuffle, "num_workers": args.num_workers}
    if args.decoded:
        return DataLoader(Decoded(split, shift), collate_fn=collate_decoded, **options)

    def apply(batch):
        return {"x": [transform(image) for image in batch["image"]], "y": batch["label"]}

    return DataLoader(split.with_transform(apply), collate_fn=collate, **options)


def main() -> None:
    args = read_flags(__doc__)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == args.processes
    torch.set_num_threads(1)
    files = {split: f"{args.data}/{split}-*.parquet" for split in ("train", "test")}
    splits = load_dataset("parquet", data_files=files)
    transform, shift = training_transform(args), shift_of(args)
    train = make_loader(splits["train"], transform, shift, batch_size(args), args, shuffle=True)
    test = make_loader(splits["test"], test_transform(), nn.Identity(), 512, args)
    some = splits["train"].select(range(0, len(splits["train"]), 60))
    first = torch.cat([pil_to_tensor(row["image"]) for row in some])
    model, optimizer, scheduler = make_work(args, first)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    clock = Clock()
    for epoch in range(args.epochs):
        model.train()
        clock.start()
        seen = 0
        for update, (x, y) in enumerate(train, 1):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if scheduler:
                scheduler.step()
            optimizer.zero_grad()
            seen += len(y) * accelerator.num_processes
            if update == args.updates:
                break
        clock.stop(seen)
        model.eval()
        correct = count = 0
        for x, y in test:
            with torch.no_grad():
                found, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
            correct, count = correct + (found == y).sum().item(), count + len(y)
        line = clock.line(epoch=epoch + 1, accuracy=correct / count)
        accelerator.print(line, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
