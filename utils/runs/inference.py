"""What eval.py, predict.py and export.py compute with: the weights of a checkpoint, a file or a
library.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn

from utils.config import Settings, require
from utils.console import join_names, say
from utils.data import InputSpec, SampleTable, absolute_data, sides
from utils.files import expand
from utils.models import (
    TestTimeAugmentation,
    build_model,
    check_model,
    input_spec,
    read_weights,
    resize_input,
)
from utils.models.matching import count_outputs, fit_names
from utils.models.published import (
    CLASSES,
    names_as_in,
    published_model,
    published_outputs,
    version_of,
)
from utils.ranks import Ranks, check_precision, compile_model
from utils.runs.foreign import classes_of_outputs, fill_input, read_foreign
from utils.runs.loading import load_weights
from utils.runs.manifest import EMA_FILE, WEIGHTS_FILE, files_of, find_checkpoint, verify
from utils.runs.metadata import read_checkpoint
from utils.settings.scripts import CheckpointConfig, EvalConfig, InferenceConfig
from utils.settings.train import OF_ONE_START, TrainConfig
from utils.tasks import Task

_SPLITS = ("train_split", "eval_split", "eval_fraction", "fold", "group_by")


@dataclass(frozen=True)
class Inference:
    """The weights of a model, with the settings that they need.

    Those of a checkpoint are read at once, because a training run may delete it. Those of a library
    are downloaded when `tensors` is called, after the data was checked.
    """

    path: Path  # of the checkpoint or file; the name of a published model
    config: TrainConfig
    spec: InputSpec
    class_names: list[str]  # empty if the weights do not name them
    tensors: Callable[[], Mapping[str, Tensor]]
    origin: Mapping  # what a record of an evaluation says about them
    table: Callable[[], SampleTable | None] = lambda: None  # of the samples of the run
    evaluation: Mapping | None = None  # of these weights, in the run
    evaluated_on: str = ""  # the split of this evaluation
    # without class names: the classes of the outputs, given those of the data
    name_outputs: Callable[[list[str]], list[str]] = list
    own_data: bool = False  # whether `config` has the data of the run


def open_inference(flags: CheckpointConfig, ranks: Ranks) -> Inference:
    """The weights that --ckpt or --model names, with the settings that these flags replace;
    collective.

    Prints a line for each flag that has no effect.
    """
    if isinstance(flags, EvalConfig) and flags.model:
        found = _of_model(flags.model, flags, ranks)
    else:
        found = find_saved(flags.ckpt, flags.weights, ranks)
    with ranks.agree():
        found = _with_flags(found, flags)
        if isinstance(flags, InferenceConfig):  # export.py computes in full precision
            check_precision(found.config, ranks)
    for line in _without_effect(flags, found):
        say(line)
    return found


def find_saved(ckpt: str, kind: str | None, ranks: Ranks, tries: int = 10) -> Inference:
    """The weights of the verified checkpoint of --ckpt that --weights `kind` names; collective.

    If a training run deletes the checkpoint meanwhile, the search begins anew.
    """
    # Only the main process searches: a training run could move `best` between two searches.
    path = ranks.from_main(lambda: find_checkpoint(expand(ckpt)))
    try:
        ranks.from_main(lambda: verify(path), no_timeout=True)
        with ranks.agree():
            return _read_saved(path, kind)
    except (ValueError, OSError):
        if tries == 1 or not ranks.any_rank(not path.is_dir()):
            raise
    return find_saved(ckpt, kind, ranks, tries - 1)


def _read_saved(path: Path, kind: str | None) -> Inference:
    """The weights of a verified checkpoint: by default the average, if it has one."""
    saved = read_checkpoint(path)
    has_average = EMA_FILE in files_of(path)
    fix = "use --weights raw, or train with --ema_decay"
    require(has_average or kind != "ema", f"{path}: has no average of the weights", fix)
    uses_average = has_average and kind != "raw"
    tensors = read_weights(path / (EMA_FILE if uses_average else WEIGHTS_FILE))
    state = saved.state
    origin = {"checkpoint": str(path.absolute()), "step": state.step, "epoch": state.epochs_begun}
    if has_average:
        origin["weights"] = "ema" if uses_average else "raw"
    # With an average, the run has evaluated it.
    is_evaluated = state.evaluation.get("step") == state.step and uses_average == has_average
    return Inference(
        path,
        saved.config,
        saved.spec,
        saved.class_names,
        lambda: tensors,
        origin,
        lambda: saved.table,
        state.evaluation if is_evaluated else None,
        evaluated_on=saved.state_file.evaluated_on,
        own_data=True,
    )


def _of_model(model: str, flags: EvalConfig, ranks: Ranks) -> Inference:
    """The weights of --model in a file or of its library; collective."""
    config = TrainConfig(
        model=model, pretrained=flags.pretrained, task="classification", report=False
    )
    config = replace(config, **given_settings(flags))
    with ranks.agree():
        check_model(config)
        if flags.pretrained:
            outputs = published_outputs(model)
            problem = f"the weights have {outputs:,} classes, not the 1,000 of ImageNet"
            fix = "use --weights with their model.safetensors"
            fix = f"{fix}, and list the classes in a config.json beside it"
            require(outputs == len(CLASSES), problem, fix)
            return Inference(
                Path(model),
                config,
                input_spec(config, 3, None),
                [],
                lambda: published_model(config).state_dict(),
                {"model": model, "pretrained": version_of(config)},
                name_outputs=names_as_in,
            )
    return _of_file(config, f"{flags.weights}", ranks)


def _of_file(config: TrainConfig, file: str, ranks: Ranks) -> Inference:
    """The weights of --model in a file or repository; collective."""
    where = f"--weights {file}"
    source = read_foreign("--weights", file, config.model, ranks)
    ranks.check_same(source.weights, f"different weights in {where}")
    with ranks.agree("building the model"):
        config = fill_input(config, source.settings)
        config = replace(config, image_size=config.image_size or config.eval_size)
        spec = input_spec(config, 3, None)
        # for the names of its tensors
        model = build_model(config, spec, 1, weight_bytes=math.inf)
        in_order = config.init_match == "order"
        tensors, left_out = fit_names(source.tensors, model, where, config.model, in_order)
        outputs = count_outputs(tensors, model)
        fix = "set --model to the model of these weights"
        require(outputs > 0, f"{where}: has no head for {config.model}", fix)
    if left_out:
        say(f"{where}: not used: {join_names(left_out, 6)}")
    return Inference(
        Path(source.name),
        config,
        spec,
        source.class_names,
        lambda: tensors,
        {"model": config.model, "weights": file},
        name_outputs=partial(classes_of_outputs, outputs),
    )


def given_settings(flags: Settings) -> dict:
    """The settings of a training run that these flags replace: those that both have, except
    --model, --pretrained and those of one start.
    """
    own = {setting.name for setting in fields(TrainConfig)} - {*OF_ONE_START, "model", "pretrained"}
    return {name: value for name, value in vars(flags).items() if name in own and value is not None}


def _with_flags(found: Inference, flags: CheckpointConfig) -> Inference:
    """The same weights with the settings that the flags give, and with the evaluation input that
    follows from them.
    """
    given = given_settings(flags)
    is_other = "data" in given and absolute_data(given["data"]) != found.config.data
    own_data = found.own_data and not is_other
    if found.own_data and is_other and isinstance(flags, EvalConfig) and found.table() is None:
        say("the checkpoint has no table of its samples: images of the training are not counted")
    if isinstance(flags, EvalConfig):
        given |= {"metrics": True, "max_eval_samples": flags.max_eval_samples}
        if not own_data:  # other data has other splits
            given |= dict.fromkeys(_SPLITS)
    config = replace(found.config, **given)
    spec = found.spec.for_evaluation().cropped(config.eval_crop)
    if config.eval_size not in (None, found.config.eval_size):
        spec = resize_input(found.spec, config, sides(config.eval_size))
    spec = replace(found.spec, evaluation=spec)
    return replace(found, config=config, spec=spec, own_data=own_data)


def _without_effect(flags: CheckpointConfig, found: Inference) -> list[str]:
    """Lines about given settings that have no effect."""
    config = found.config
    lines = []
    if isinstance(flags, InferenceConfig) and flags.threshold is not None:
        if config.task == "classification":
            lines.append("--threshold has no effect: only multilabel and binary use it")
    if isinstance(flags, EvalConfig) and config.eval_crop is not None:
        if found.spec.for_evaluation().small:
            lines.append("--eval_crop has no effect: small images are evaluated whole")
    return lines


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
