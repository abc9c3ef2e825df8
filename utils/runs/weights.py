"""The weights of an evaluation: those of a checkpoint, their moving average, or the mean of several checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from utils.console import join_names
from utils.errors import UserError
from utils.models.checking import bad_tensors
from utils.runs.loading import check_fit, read_weights
from utils.runs.manifest import checkpoints_of, files_of, find_checkpoint, is_checkpoint_name, step_of
from utils.runs.parts import EMA


@dataclass(frozen=True)
class Weights:
    """The weights of an evaluation, from verified checkpoints, oldest first.

    They are read at once, because a training run may delete the checkpoints. `manifests` has what `files_of` returns
    for each. `part` is "model" or "ema". If `is_choice`, the newest checkpoint has both. `tensors` has the weights, or
    their mean over several checkpoints.
    """

    checkpoints: Sequence[Path]
    manifests: Sequence[dict[str, dict]]
    part: str
    is_choice: bool
    tensors: Mapping[str, Tensor]

    def load(self, model: nn.Module) -> None:
        """Copy the weights into the model. Raises ValueError if they do not fit, or if one is NaN or infinite."""
        newest = self.checkpoints[-1]
        check_fit(newest, self.tensors, model)
        if bad := bad_tensors(self.tensors):
            raise UserError(f"{newest}: weights are NaN or infinite ({join_names(bad, 3)})", "use another checkpoint")
        model.load_state_dict(self.tensors)

    def describe(self) -> dict[str, Any]:
        """What the record of the evaluation says about them."""
        kind: dict[str, Any] = {"weights": "ema" if self.part == EMA else "raw"} if self.is_choice else {}
        if len(self.checkpoints) > 1:
            kind["averaged"] = [step_of(path) for path in self.checkpoints]
        return kind


def find_checkpoints(path: Path, average: int | None) -> list[Path]:
    """The checkpoint to evaluate or, with `average`, that many, oldest first.

    `path` is a run folder or a checkpoint. The last checkpoint is the newest of the run, or `path` if that is a
    checkpoint. Raises ValueError if there are fewer.
    """
    if average is None:
        return [find_checkpoint(path)]
    last = find_checkpoint(path, prefer=("latest",))
    found = [last]
    if is_checkpoint_name(last.name):
        found = [other for other in checkpoints_of(last.absolute().parent) if step_of(other) <= step_of(last)]
    if len(found) < average:
        problem = f"--average {average}: {last.parent} has {len(found)} checkpoints up to {last.name}"
        raise UserError(problem, "lower it, or train with a higher --keep")
    return found[-average:]


def choose_weights(checkpoints: Sequence[Path], kind: str | None) -> Weights:
    """Read the weights that --weights names, by default the average if the newest checkpoint has one."""
    manifests = [files_of(path) for path in checkpoints]
    has_average = [f"{EMA}.safetensors" in files for files in manifests]
    kind = kind or ("ema" if has_average[-1] else "raw")
    if kind == "ema" and not all(has_average):
        lacking = checkpoints[has_average.index(False)]
        raise UserError(f"{lacking}: has no average of the weights", "use --weights raw, or train with --ema_decay")
    part = EMA if kind == "ema" else "model"
    return Weights(checkpoints, manifests, part, has_average[-1], _mean_of(checkpoints, part))


def _mean_of(checkpoints: Sequence[Path], part: str) -> dict[str, Tensor]:
    """The mean of the weights of these checkpoints; integers are those of the last one."""
    sums: dict[str, Tensor] = {}
    for path in checkpoints:
        newest = read_weights(path, part)
        for name, tensor in newest.items():
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return {
        name: (sums[name] / len(checkpoints)).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in newest.items()
    }
