"""A checkpoint with its model, ready for export, and the probabilities that an export must
reproduce.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.models.zoo import OWN_MODELS
from utils.ranks.ranks import Ranks
from utils.runs.inference import Inference, load_model
from utils.tasks.table import make_task
from utils.tasks.task import Task

TOLERANCE = 1e-5  # in probability


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: its model in evaluation mode on the CPU, and the model's input in
    evaluation.
    """

    saved: Inference
    task: Task
    spec: InputSpec
    model: nn.Module

    @property
    def is_average(self) -> bool:
        """Whether the weights are the moving average of --ema_decay."""
        return self.saved.origin.get("weights") == "ema"

    @property
    def name(self) -> str:
        """The model's name in its library."""
        return self.saved.config.model.removeprefix("timm/")

    @property
    def library(self) -> str:
        """Where the architecture is defined: torchvision, timm or lockstep."""
        if self.saved.config.model.startswith("timm/"):
            return "timm"
        return "lockstep" if self.name in OWN_MODELS else "torchvision"


class Probabilities(nn.Module):
    """From uint8 images [n, H, W, C] to probabilities, float32 [n, outputs]: normalisation, model,
    activation.
    """

    def __init__(self, loaded: Loaded):
        super().__init__()
        self.model, self.activation = loaded.model, loaded.task.activation
        std, mean = torch.tensor(loaded.spec.std), torch.tensor(loaded.spec.mean)
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def forward(self, images: Tensor) -> Tensor:
        values = (images.float() * self.scale + self.shift).permute(0, 3, 1, 2)
        logits = self.model(values.contiguous())
        return logits.softmax(1) if self.activation == "softmax" else logits.sigmoid()


def probabilities(loaded: Loaded, images: np.ndarray) -> np.ndarray:
    """The model's probabilities, float32 [n, outputs], of uint8 images [n, H, W, C]."""
    with torch.inference_mode():
        return Probabilities(loaded)(torch.from_numpy(images)).numpy()


def compare(loaded: Loaded, form: str, predict: Callable[[np.ndarray], np.ndarray]) -> float:
    """The largest difference in a probability between `predict` of an export and the checkpoint.

    They are compared on random pixels, in batches of 1, 2 and 7 images. Raises ValueError if they
    differ by over 1e-5.
    """
    spec, random, worst = loaded.spec, np.random.default_rng(0), 0.0
    for count in (1, 2, 7):
        images = random.integers(0, 256, (count, spec.height, spec.width, spec.channels), np.uint8)
        expected, got = probabilities(loaded, images), predict(images)
        difference = float(np.abs(got - expected).max()) if got.shape == expected.shape else np.inf
        if not difference <= TOLERANCE:  # NaN is not
            what = f"probabilities that differ by {difference:.2g} from the checkpoint's"
            problem = f"--to {form}: {loaded.saved.config.model} has {what}"
            raise UserError(problem, "use another format, and check that the weights are finite")
        worst = max(worst, difference)
    return worst


def load(saved: Inference, ranks: Ranks) -> Loaded:
    """The model of a verified checkpoint, with its chosen weights.

    Raises ValueError if they do not fit.
    """
    config, task = make_task(saved.config, saved.class_names, None)
    task.check_predictions()
    model = load_model(replace(saved, config=config), task, ranks)
    model.requires_grad_(False).to(memory_format=torch.contiguous_format)
    return Loaded(saved, task, saved.spec.for_evaluation(), model)
