"""A training run: everything that the loop uses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from utils.data import DeviceLoader
from utils.models import WeightAverage
from utils.ranks import Stopping, search_pays
from utils.runs import CheckpointManager, RunLog, RunTrackers
from utils.training.evaluation import Evaluator
from utils.training.gradients import make_gradients
from utils.training.meter import Meter
from utils.training.setup import Setup


@dataclass(kw_only=True, eq=False)
class Run(Setup):
    """All parts of a training run. No attribute is replaced, but the objects in them change.

    `model` is the network as Accelerate wraps it, for training, and `module` without the wrapper,
    for evaluation; `average` is that of its weights, with --ema_decay; `loaders` are those of
    training and evaluation, as Accelerate wraps them. Collective.
    """

    stopping: Stopping
    checkpoints: CheckpointManager
    folder: Path
    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    average: WeightAverage | None
    loaders: Sequence[DataLoader]

    def __post_init__(self) -> None:
        config, spec, task, state = self.config, self.spec, self.task, self.state
        is_main, device = self.ranks.is_main, self.accelerator.device
        train_loader, eval_loader = self.loaders
        with self.ranks.agree("opening the log"):
            self.log = RunLog(self.folder, is_main, state, self.updates, task, self.paused)
        self.trackers = RunTrackers(self.accelerator, config, self.folder, state.run_id)
        self.train_batches = DeviceLoader(train_loader, spec, config, device, True, task.outputs)
        self.evaluator = Evaluator(
            ranks=self.ranks,
            accelerator=self.accelerator,
            model=self.module,
            loader=eval_loader,
            spec=spec.for_evaluation(),
            task=task,
            config=config,
        )
        self.gradients = make_gradients(self, self.model, self.train_batches)
        self.gradients.searches = search_pays(self.updates - state.step)
        self.meter = Meter(task, device, state.since_log, is_main, self.optimizer)

    @property
    def keeps_predictions(self) -> bool:
        """Whether evaluations keep their predictions, for the page and to compare with the head."""
        return self.config.report or self.config.fits_head

    @property
    def is_complete(self) -> bool:
        """Whether neither updates nor an evaluation remain to be done."""
        return bool(self.ended) and not self.state.owes_evaluation

    @property
    def paused(self) -> bool:
        """Whether --stop_after ends this start before the end of the run."""
        return self.state.step == self.config.stop_after and not self.ended

    @property
    def over(self) -> bool:
        """Whether this start computes no more updates; the ranks agree."""
        return bool(self.ended) or self.paused or self.stopping.agreed

    @property
    def ended(self) -> str:
        """The setting that has ended training after update `state.step`; empty if updates remain.

        It follows from the state, so all ranks agree, and a resumed run with a higher limit
        continues.
        """
        config = self.config
        state = self.state
        if state.step >= self.updates:
            return "max_steps" if config.max_steps else "epochs"
        if state.seconds >= (config.max_seconds or math.inf):
            return "max_seconds"
        patience = config.early_stopping or math.inf
        return "early_stopping" if state.evaluations_since_best >= patience else ""
