"""What eval.py, predict.py and export.py compute with: the weights of a checkpoint, a file or a
library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from utils.config import Settings, require
from utils.data import InputSpec, SampleList, sides
from utils.files import expand
from utils.models import TestTimeAugmentation, build_model, read_weights, resize_input
from utils.ranks import Ranks, compile_model
from utils.runs.loading import load_weights
from utils.runs.manifest import EMA_FILE, WEIGHTS_FILE, files_of, find_checkpoint, verify
from utils.runs.metadata import read_checkpoint
from utils.settings.scripts import EvalConfig, PredictConfig
from utils.settings.train import OF_ONE_START, TrainConfig
from utils.tasks import Task


@dataclass(frozen=True)
class Inference:
    """The weights of a model, with the settings that they need.

    Those of a checkpoint are read at once, because a training run may delete it. Those of a library
    are downloaded when `tensors` is called, after the data was checked.
    """

    path: Path  # of the checkpoint or file; the name of a published model
    config: TrainConfig
    spec: InputSpec
    # list[str], or a function that takes those of the data and returns those of the outputs
    class_names: Any
    tensors: Callable[[], Mapping[str, Tensor]]
    origin: Mapping  # what a record of an evaluation says about them
    samples: SampleList | None = None  # the samples of the run
    evaluation: Mapping | None = None  # of these weights, in the run


def find_saved(ckpt: str, kind: str | None, ranks: Ranks, tries: int = 10) -> Inference:
    """The weights of the verified checkpoint of --ckpt that --weights `kind` names; collective.

    If a training run deletes the checkpoint meanwhile, the search begins anew.
    """
    # Only the main process searches: a training run could move `best` between two searches.
    path = ranks.from_main(lambda: find_checkpoint(expand(ckpt)))
    try:
        ranks.from_main(lambda: verify(path), no_timeout=True)
        with ranks.agree():
            return _read(path, kind)
    except (ValueError, OSError):
        if tries == 1 or not ranks.any_rank(not path.is_dir()):
            raise
    return find_saved(ckpt, kind, ranks, tries - 1)


def _read(path: Path, kind: str | None) -> Inference:
    """The weights of a verified checkpoint: by default the average, if it has one."""
    saved = read_checkpoint(path)
    has_average = EMA_FILE in files_of(path)
    fix = "use --weights raw, or train with --ema_decay"
    require(has_average or kind != "ema", f"{path}: has no average of the weights", fix)
    kind = kind or ("ema" if has_average else "raw")
    state = saved.state
    origin = {"checkpoint": str(path.absolute()), "step": state.step, "epoch": state.epochs_begun}
    # With an average, those of the average.
    known = state.evaluation.get("step") == state.step and (kind == "ema" or not has_average)
    tensors = read_weights(path / (EMA_FILE if kind == "ema" else WEIGHTS_FILE))
    return Inference(
        path,
        saved.config,
        saved.spec,
        saved.class_names,
        lambda: tensors,
        origin | ({"weights": kind} if has_average else {}),
        saved.samples,
        state.evaluation if known else None,
    )


def with_settings(found: Inference, config: TrainConfig) -> Inference:
    """The same weights with these settings, and with the input in evaluation that they ask for."""
    spec = found.spec.for_evaluation().cropped(config.eval_crop)
    if config.eval_size not in (None, found.config.eval_size):
        spec = resize_input(found.spec, config, sides(config.eval_size))
    return replace(found, config=config, spec=replace(found.spec, evaluation=spec))


def load_model(found: Inference, task: Task, ranks: Ranks) -> nn.Module:
    """The model with these weights, on the CPU in evaluation mode; collective.

    Raises ValueError if the weights do not fit.
    """
    with ranks.local_main_first("reading the weights"):
        tensors = found.tensors()
    with ranks.agree("building the model"):
        size = sum(tensor.nbytes for tensor in tensors.values())
        model = build_model(found.config, found.spec, task.outputs, size)
        load_weights(found.path, tensors, model)
    return model.eval()


def place_model(model: nn.Module, tta: str | None, accelerator: Accelerator) -> nn.Module:
    """The model, or its test-time augmentation `tta`, compiled and on the device; without DDP."""
    compile_model(accelerator, model)
    return (TestTimeAugmentation(model, tta) if tta else model).to(accelerator.device).eval()


def given_settings(flags: Settings) -> dict:
    """The settings of a training run that these flags replace: those that both have, except where
    it is launched.
    """
    own = {setting.name for setting in fields(TrainConfig)} - {*OF_ONE_START, "model", "pretrained"}
    return {name: value for name, value in vars(flags).items() if name in own and value is not None}


def warn_about_flags(flags: EvalConfig | PredictConfig, found: Inference) -> list[str]:
    """Lines about given settings that have no effect."""
    config = found.config
    lines = []
    if flags.threshold is not None and config.task == "classification":
        lines.append("--threshold has no effect: only multilabel and binary use it")
    small = found.spec.for_evaluation().small
    if isinstance(flags, EvalConfig) and config.eval_crop is not None and small:
        lines.append("--eval_crop has no effect: small images are evaluated whole")
    return lines
