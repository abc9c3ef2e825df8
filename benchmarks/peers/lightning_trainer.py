"""MNIST with Lightning's Trainer: `pip install lightning` first.

    python benchmarks/peers/lightning_trainer.py --data DIR --processes 2 --epochs 2

DIR was made by mnist.py. All processes run on the CPU. The Trainer has no logger, no checkpoints
and no progress bar. After each epoch, all processes evaluate the test images, and process 0 prints
a line of JSON.
"""

import lightning
import torch
import torch.nn.functional as F
from parts import Clock, batch_size, make_work, read_flags, test_transform, training_transform
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST


class Classifier(lightning.LightningModule):
    def __init__(self, args, images):
        super().__init__()
        self.model, self.optimizer, self.scheduler = make_work(args, images)
        self.clock = Clock()

    def training_step(self, batch, index):
        x, y = batch
        self.seen += len(y) * self.trainer.world_size
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        if self.scheduler is None:
            return self.optimizer
        schedule = {"scheduler": self.scheduler, "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}

    def on_train_epoch_start(self):
        self.seen = 0
        self.clock.start()

    def on_validation_start(self):
        self.clock.stop(self.seen)
        self.counts = torch.zeros(2)

    def validation_step(self, batch, index):
        x, y = batch
        correct = (self.model(x).argmax(1) == y).sum()
        self.counts += torch.stack([correct, torch.tensor(len(y))])

    def on_validation_epoch_end(self):
        correct, count = self.trainer.strategy.reduce(self.counts, reduce_op="sum").tolist()
        if self.global_rank == 0:
            line = self.clock.line(epoch=self.current_epoch + 1, accuracy=correct / count)
            print(line, flush=True)


def main() -> None:
    args = read_flags(__doc__)
    torch.set_num_threads(1)
    lightning.seed_everything(args.seed, verbose=False)
    images = MNIST(args.data, train=True, transform=training_transform(args))
    loader = DataLoader(images, batch_size(args), shuffle=True, num_workers=args.num_workers)
    tests = DataLoader(MNIST(args.data, train=False, transform=test_transform()), batch_size=512)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.processes,
        strategy="ddp",
        max_epochs=args.epochs,
        limit_train_batches=args.updates or 1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args, images.data[::60]), loader, tests)


if __name__ == "__main__":
    main()
