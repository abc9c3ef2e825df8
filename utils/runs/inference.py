"""Load a checkpoint for eval.py, predict.py and export.py, the same on all ranks."""

from dataclasses import fields, replace
from typing import Any

from accelerate import Accelerator
from torch import nn

from utils.config.scripts import EvalConfig, PredictConfig
from utils.config.settings import OF_ONE_START, LaunchConfig, TrainConfig
from utils.data.spec import InputSpec
from utils.files import expand
from utils.models.layers import TestTimeAugmentation
from utils.models.published import load_published
from utils.models.zoo import build_model
from utils.ranks.accelerator import compile_model
from utils.ranks.ranks import Ranks
from utils.runs.loading import choose_weights, load_weights
from utils.runs.manifest import find_checkpoint, verify
from utils.runs.metadata import SavedRun, read_checkpoint
from utils.tasks.task import Task


def find_saved(ckpt: str, kind: str | None, ranks: Ranks, tries: int = 10) -> SavedRun:
    """The verified checkpoint of --ckpt, with the weights that --weights `kind` names; collective.

    Everything is read here. If a training run deletes the checkpoint meanwhile, the search begins
    anew.
    """
    # Only the main process searches: a training run could move `best` between two searches.
    path = ranks.from_main(lambda: find_checkpoint(expand(ckpt)))
    try:
        ranks.from_main(lambda: verify(path), patient=True)
        with ranks.agree():
            return replace(read_checkpoint(path, ranks.is_main), weights=choose_weights(path, kind))
    except (ValueError, OSError):
        if tries == 1 or not ranks.any_rank(not path.is_dir()):
            raise
    return find_saved(ckpt, kind, ranks, tries - 1)


def load_for_inference(saved: SavedRun, config: TrainConfig, task: Task, ranks: Ranks) -> nn.Module:
    """The model with the chosen or published weights, on the CPU in evaluation mode; collective.

    Raises ValueError if the weights do not fit.
    """
    with ranks.agree("building the model"):
        model = build_model(config, saved.spec, task.outputs, saved.weight_bytes)
    if saved.weights is None:
        with ranks.local_main_first("downloading the weights"):
            load_published(config, model)
    else:
        with ranks.agree("loading the weights"):
            load_weights(saved.weights.checkpoint, saved.weights.tensors, model)
    return model.eval()


def place_model(model: nn.Module, tta: str | None, accelerator: Accelerator) -> nn.Module:
    """The model, or its test-time augmentation `tta`, compiled and on the device; without DDP."""
    compile_model(accelerator, model)
    return (TestTimeAugmentation(model, tta) if tta else model).to(accelerator.device).eval()


def set_evaluation_input(saved: SavedRun, spec: InputSpec) -> SavedRun:
    """The same run, with this input in evaluation."""
    changed = replace(saved.spec, evaluation=None if spec == saved.spec else spec)
    return replace(saved, values=replace(saved.values, input=changed))


def given_settings(flags: LaunchConfig) -> dict[str, Any]:
    """The settings of a training run that these flags replace: those that both have, except where
    it is launched.
    """
    own = {setting.name for setting in fields(TrainConfig)} - {*OF_ONE_START, "model", "pretrained"}
    return {name: value for name, value in vars(flags).items() if name in own and value is not None}


def warn_about_flags(
    flags: EvalConfig | PredictConfig, config: TrainConfig, spec: InputSpec
) -> list[str]:
    """Lines about given settings that have no effect or do not suit the run; `spec` is that of the
    evaluation.
    """
    lines = []
    if flags.threshold is not None and config.task == "classification":
        lines.append("--threshold has no effect: only multilabel and binary use it")
    if isinstance(flags, EvalConfig) and config.eval_crop is not None and spec.small:
        lines.append("--eval_crop has no effect: small images are evaluated whole")
    return lines
