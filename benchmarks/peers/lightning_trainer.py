"""MNIST with Lightning's Trainer: `pip install lightning` first.

    python benchmarks/peers/lightning_trainer.py --data DIR --processes 2 --epochs 2

DIR was made by mnist.py. The Trainer has no logger, no checkpoints and no progress bar. After each
epoch, process 0 evaluates the test images and prints a line of JSON.
"""

import lightning
import torch
import torch.nn.functional as F
from parts import Clock, batch_size, make_work, read_flags, test_transform, training_transform
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST


class Classifier(lightning.LightningModule):
    def __init__(self, args, images, tests):
        super().__init__()
        self.model, self.optimizer, self.scheduler = make_work(args, images)
        self.tests = tests
        self.clock = Clock()
        self.seen = 0

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

    @torch.no_grad()
    def on_train_epoch_end(self):
        self.clock.stop(self.seen)
        if self.global_rank == 0:
            self.model.eval()
            found = ((self.model(x.to(self.device)).argmax(1).cpu(), y) for x, y in self.tests)
            correct = sum((predicted == y).sum().item() for predicted, y in found)
            accuracy = correct / len(self.tests.dataset)
            print(self.clock.line(epoch=self.current_epoch + 1, accuracy=accuracy), flush=True)
            self.model.train()


def main() -> None:
    args = read_flags(__doc__)
    torch.set_num_threads(1)
    images = MNIST(args.data, train=True, transform=training_transform(args))
    loader = DataLoader(images, batch_size(args), shuffle=True, num_workers=args.num_workers)
    tests = DataLoader(MNIST(args.data, train=False, transform=test_transform()), batch_size=512)
    trainer = lightning.Trainer(
        devices=args.processes,
        strategy="ddp" if args.processes > 1 else "auto",
        max_epochs=args.epochs,
        limit_train_batches=args.updates or 1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args, images.data[::60], tests), loader)


if __name__ == "__main__":
    main()
