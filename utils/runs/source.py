"""The weights that a new run starts from (--init_from), and those of eval.py: of a run, a file or
the Hub.
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from utils.config import require
from utils.console import join_names, say
from utils.errors import UserError, one_line
from utils.files import expand, read_json
from utils.hub import use_hub
from utils.models import bad_tensors, build_model, check_model, hash_tensors, input_spec, read_any
from utils.models.matching import Match, copy_matching, count_outputs, fit_names, zero_heads
from utils.models.published import (
    input_of,
    names_of_outputs,
    published_input,
    published_model,
    published_outputs,
    version_of,
)
from utils.ranks import Ranks
from utils.runs.inference import Inference, find_saved, given_settings
from utils.runs.manifest import MANIFEST_FILE, WEIGHTS_FILE, is_checkpoint_name
from utils.runs.metadata import Checkpoint
from utils.settings.scripts import EvalConfig
from utils.settings.train import TrainConfig

_HUB = "hf://"
_OF_MODEL = ("model", "model_args", "stem")
_OF_INPUT = ("channels", "image_size", "mean", "std", "interpolation", "eval_crop", "squash")
_SETTINGS = _OF_MODEL + _OF_INPUT
"""Settings that a run takes from its source unless they are given; those of the model belong
together."""


@dataclass
class InitialWeights:
    """Weights to start from. `settings` has those of the run's settings that follow from them."""

    name: str
    tensors: Mapping[str, Tensor]
    class_names: list[str]
    settings: dict
    # settings that were not given, and the order of outputs
    taken: list[str] = field(default_factory=list)
    match: Match | None = None  # once the model has the weights

    def __post_init__(self) -> None:
        self.weights = hash_tensors(self.tensors.values())

    def describe(self) -> str:
        """What the run took from it, for the start table."""
        taken = f"; its {', '.join(self.taken)}" if self.taken else ""
        return f"{self.name}: {self.match.line() if self.match else ''}{taken}"


def load_initial_weights(
    config: TrainConfig, saved: Checkpoint | None, ranks: Ranks
) -> tuple[TrainConfig, InitialWeights | None]:
    """What --init_from names, and the settings with those that follow from it; collective.

    A run that resumes from the checkpoint `saved` needs no source. It keeps these settings as they
    were.
    """
    if saved:
        kept = saved.config.init_from
        if config.init_from and absolute_source(config.init_from) != kept:
            say("--init_from has no effect: a resumed run has the weights of its checkpoint")
        return replace(config, init_from=kept), None
    if config.init_from is None:
        return config, None
    if ranks.from_main(partial(_is_run, config.init_from)):
        source = _of_run(find_saved(config.init_from, None, ranks))
    else:
        source = read_source("--init_from", config.init_from, config.model, ranks)
    with ranks.agree():
        filled = fill_input(config, source.settings)
    ranks.check_same(source.weights, f"different weights in --init_from {config.init_from}")
    source.taken = [name for name in _SETTINGS if getattr(filled, name) != getattr(config, name)]
    return replace(filled, init_from=absolute_source(config.init_from)), source


def read_source(flag: str, where: str, model: str | None, ranks: Ranks) -> InitialWeights:
    """The weights in the file, folder or repository `where`, the value of `flag`, for this `model`;
    collective.
    """
    found = ranks.from_main(partial(_find, flag, where), no_timeout=True)
    with ranks.local_main_first(f"reading the weights of {flag}"):
        return _read(flag, found, model)


def fill_input(config: TrainConfig, found: Mapping) -> TrainConfig:
    """The settings, with those of `found` that are not given.

    Arguments and stem belong to the model that has them.
    """
    names = _SETTINGS if config.model in (None, found.get("model")) else _OF_INPUT
    values = {
        name: found[name]
        for name in names
        if getattr(config, name) in (None, {}, "auto") and found.get(name)
    }
    for name in {"mean", "std"} & values.keys():
        if (config.channels or values.get("channels")) != len(values[name]):
            values[name] = [sum(values[name]) / len(values[name])]
    return replace(config, **values)


def _is_run(where: str) -> bool:
    """Whether --init_from names a run or a checkpoint."""
    path = expand(where)
    is_checkpoint = (path / MANIFEST_FILE).exists() or is_checkpoint_name(path.name)
    return path.is_dir() and (is_checkpoint or not (path / WEIGHTS_FILE).is_file())


def _find(flag: str, where: str) -> str:
    """The file or folder that the flag names, as an absolute path, or hf://OWNER/NAME@COMMIT."""
    if where.startswith(_HUB):
        # snapshots/COMMIT/model.safetensors
        return f"{where.partition('@')[0]}@{_download(flag, where).parent.name}"
    fix = f"give {'a run, a checkpoint, ' * (flag == '--init_from')}a file of weights or hf://OWNER/NAME"
    require(expand(where).exists(), f"{flag} {where}: no such file or folder", fix)
    return os.path.abspath(expand(where))


def _download(flag: str, where: str) -> Path:
    """The weights of a repository of the Hub in the local cache, with config.json beside them if
    there is one.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, commit = where.removeprefix(_HUB).partition("@")
    try:
        use_hub()
        path = hf_hub_download(repository, WEIGHTS_FILE, revision=commit or None)
    except Exception as error:  # of many classes
        problem = f"{flag} {where}: {WEIGHTS_FILE} of {repository} cannot be downloaded ({one_line(error)[:160]})"
        command = f"hf download {repository} {WEIGHTS_FILE} config.json"
        fix = f"correct the name, or, without a network, run `{command}` elsewhere"
        raise UserError(problem, f"{fix} and copy the files to {HF_HUB_CACHE}") from error
    with suppress(EntryNotFoundError):
        hf_hub_download(repository, "config.json", revision=Path(path).parent.name)
    return Path(path)


def _of_run(saved: Inference) -> InitialWeights:
    """The weights of a run, with those of its settings that a run can take."""
    config = saved.config
    spec = saved.spec
    values = vars(spec) | {name: vars(config)[name] for name in (*_OF_MODEL, "eval_crop")}
    values["image_size"] = list(spec.size)
    if config.pretrained:
        values["stem"] = "standard"
        values["eval_crop"] = config.eval_crop or published_input(config.model)["eval_crop"]
    return InitialWeights(os.path.abspath(saved.path), saved.tensors(), saved.class_names, values)


def _read(flag: str, found: str, model: str | None) -> InitialWeights:
    """The weights in the file or folder that `_find` has found. Nothing in it is executed."""
    path = _download(flag, found) if found.startswith(_HUB) else Path(found)
    file = path / WEIGHTS_FILE if path.is_dir() else path
    tensors, inside = read_any(file)
    names, values = (
        _read_config(file.with_name("config.json")) if file.name == WEIGHTS_FILE else ([], {})
    )
    model = model or values.get("model")
    if not model:
        raise UserError(
            f"{flag} {found}: does not name the model of its tensors", "add --model NAME"
        )
    values = input_of_weights(model, tensors) | values
    return InitialWeights(f"{found} ({inside})" if inside else found, tensors, names, values)


def input_of_weights(model: str, tensors: Mapping[str, Tensor]) -> dict:
    """The settings of the input of these tensors, and the model if it has published weights.

    The number of channels is that of the first convolution in `tensors`. It is found by its kernel
    for one or three channels, because the names may differ. Only depthwise convolutions also have
    such kernels, for one channel.
    """
    known = published_input(model)
    inputs = {kernel.shape[1] for kernel in tensors.values() if kernel.ndim == 4} & {1, 3}
    channels = {"channels": max(inputs)} if inputs else {}
    return known | ({"model": model, "stem": "standard"} if known else {}) | channels


def _read_config(path: Path) -> tuple[list[str], dict]:
    """The class names and settings in config.json of timm or transformers, if it exists."""
    about = read_json(path) if path.is_file() else {}
    try:
        by_id = about.get("id2label", {})
        cfg = about.get("pretrained_cfg", {})
        names = about.get("label_names") or [by_id[str(number)] for number in range(len(by_id))]
        values = input_of(cfg)
        if "architecture" in about:
            values["model"] = f"timm/{about['architecture']}"
        if not all(isinstance(name, str) for name in names):
            raise ValueError("class names are not strings")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: malformed ({one_line(error)})", "delete it") from error
    return names, values


def absolute_source(where: str | None) -> str | None:
    """--init_from with an absolute path, unless it is on the Hub."""
    return where if where is None or where.startswith(_HUB) else str(expand(where).absolute())


def copy_source(
    module: nn.Module, source: InitialWeights, class_names: list[str], config: TrainConfig
) -> Match:
    """Copy the weights that fit into the model; returns which they are, and notes it in `source`.

    Raises UserError if no parameter fits, or if a copied tensor is NaN or infinite.
    """
    tensors, source.tensors = source.tensors, {}  # they are not needed again
    where = f"--init_from {source.name}"
    by_order = config.init_match == "order"
    tensors, left_out = fit_names(tensors, module, where, config.model, by_order)
    zero_heads(module)
    if not source.class_names and count_outputs(tensors, module) == len(class_names):
        source.class_names = names_of_outputs(len(class_names), False, class_names)
        source.taken.append(f"outputs for classes, in order: {join_names(source.class_names, 6)}")
    source.match = match = copy_matching(module, tensors, source.class_names, class_names)
    match.unused += left_out
    if bad := bad_tensors(module.state_dict()):
        raise UserError(f"{where}: {join_names(bad, 3)} is NaN or infinite", "use other weights")
    if not {key for key, _ in module.named_parameters()} & set(match.kept):
        theirs = join_names(tensors, 3)
        own = join_names(module.state_dict(), 3)
        problem = f"{where}: none of its tensors ({theirs}) fits {config.model}, which has {own}"
        fix = "set --model to the model of these weights, use other weights, or try --init_match order"
        raise UserError(problem, fix)
    return match


def find_inference(flags: EvalConfig, ranks: Ranks) -> Inference:
    """The weights of --ckpt, or those of --model in a file or of its library; collective."""
    if flags.ckpt:
        return find_saved(flags.ckpt, flags.weights, ranks)
    model = f"{flags.model}"
    config = TrainConfig(
        model=model, pretrained=flags.pretrained, task="classification", report=False
    )
    config = replace(config, **given_settings(flags))
    with ranks.agree():
        check_model(config)
        if flags.pretrained:
            names = partial(names_of_outputs, published_outputs(model), True)
            origin = {"model": model, "pretrained": version_of(config)}
            spec = input_spec(config, 3, None)
            return Inference(
                Path(model),
                config,
                spec,
                names,
                lambda: published_model(config).state_dict(),
                origin,
            )
    return _of_file(config, f"{flags.weights}", ranks)


def _of_file(config: TrainConfig, file: str, ranks: Ranks) -> Inference:
    """The weights of --model in a file or repository; collective."""
    where = f"--weights {file}"
    source = read_source("--weights", file, config.model, ranks)
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
    names = source.class_names or partial(names_of_outputs, outputs, False)
    origin = {"model": config.model, "weights": file}
    return Inference(Path(source.name), config, spec, names, lambda: tensors, origin)
