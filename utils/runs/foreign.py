"""Weights in a file, or in a repository of the Hub, with the settings of their input."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from utils.config import require
from utils.errors import UserError, one_line
from utils.files import expand, read_json
from utils.hub import use_hub
from utils.models import hash_tensors, read_any
from utils.models.matching import Match
from utils.models.published import CLASSES, input_of, names_as_in, published_input
from utils.ranks import Ranks
from utils.runs.manifest import WEIGHTS_FILE
from utils.settings.train import TrainConfig

HUB = "hf://"
OF_MODEL = ("model", "model_args", "stem")
_OF_INPUT = ("channels", "image_size", "mean", "std", "interpolation", "eval_crop", "squash")
TAKEN = OF_MODEL + _OF_INPUT
"""Settings that a run takes from its source unless they are given; those of the model belong
together."""


@dataclass
class InitialWeights:
    """Weights to start from. `settings` has those of the run's settings that follow from them."""

    name: str
    tensors: Mapping[str, Tensor]
    class_names: list[str]
    settings: dict
    # what the run took: settings that were not given, the order of outputs
    taken: list[str] = field(default_factory=list)
    match: Match | None = None  # once the model has the weights

    def __post_init__(self) -> None:
        self.weights = hash_tensors(self.tensors.values())

    def describe(self) -> str:
        """What the run took from it, for the start table."""
        copied = self.match.line() if self.match else ""
        taken = f"; its {', '.join(self.taken)}" if self.taken else ""
        return f"{self.name}: {copied}{taken}"


def read_foreign(flag: str, where: str, model: str | None, ranks: Ranks) -> InitialWeights:
    """The weights in the file, folder or repository `where`, the value of `flag`, for this `model`;
    collective.
    """
    found = ranks.from_main(partial(_locate, flag, where), no_timeout=True)
    with ranks.local_main_first(f"reading the weights of {flag}"):
        return _read_located(flag, found, model)


def classes_of_outputs(outputs: int, names: list[str]) -> list[str]:
    """The classes of the outputs of a file that does not name them, with `names` from the data.

    They are the classes of the data, in its order. Of 1,000 outputs, they are ImageNet's, unless
    the data has 1,000 other classes. Raises UserError if neither fits.
    """
    if outputs == len(CLASSES):
        try:
            return names_as_in(names)
        except UserError:
            if len(names) != outputs:
                raise
    problem = f"the weights have {outputs:,} classes, and --data has {len(names):,}"
    require(outputs == len(names), problem, "use data with the classes of these weights")
    return names


def fill_input(config: TrainConfig, found: Mapping) -> TrainConfig:
    """The settings, with those of `found` that are not given.

    Arguments and stem are taken only for the same model.
    """
    names = TAKEN if config.model in (None, found.get("model")) else _OF_INPUT
    values = {
        name: found[name]
        for name in names
        if getattr(config, name) in (None, {}, "auto") and found.get(name)
    }
    for name in {"mean", "std"} & values.keys():
        if (config.channels or values.get("channels")) != len(values[name]):
            values[name] = [sum(values[name]) / len(values[name])]
    return replace(config, **values)


def _locate(flag: str, where: str) -> str:
    """The file or folder that the flag names, as an absolute path, or hf://OWNER/NAME@COMMIT."""
    if where.startswith(HUB):
        # snapshots/COMMIT/model.safetensors
        return f"{where.partition('@')[0]}@{_download(flag, where).parent.name}"
    kinds = "a file of weights or hf://OWNER/NAME"
    if flag == "--init_from":
        kinds = f"a run, a checkpoint, {kinds}"
    require(expand(where).exists(), f"{flag} {where}: no such file or folder", f"give {kinds}")
    return os.path.abspath(expand(where))


def _download(flag: str, where: str) -> Path:
    """The weights of a repository of the Hub in the local cache, with config.json beside them if
    there is one.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, commit = where.removeprefix(HUB).partition("@")
    try:
        use_hub()
        path = hf_hub_download(repository, WEIGHTS_FILE, revision=commit or None)
    except Exception as error:  # of many classes
        reason = one_line(error)[:160]
        problem = f"{WEIGHTS_FILE} of {repository} cannot be downloaded ({reason})"
        command = f"hf download {repository} {WEIGHTS_FILE} config.json"
        fix = f"correct the name, or, without a network, run `{command}` elsewhere"
        fix = f"{fix} and copy the files to {HF_HUB_CACHE}"
        raise UserError(f"{flag} {where}: {problem}", fix) from error
    with suppress(EntryNotFoundError):
        hf_hub_download(repository, "config.json", revision=Path(path).parent.name)
    return Path(path)


def _read_located(flag: str, found: str, model: str | None) -> InitialWeights:
    """The weights in the file or folder that `_locate` has found. Nothing in it is executed."""
    path = _download(flag, found) if found.startswith(HUB) else Path(found)
    file = path / WEIGHTS_FILE if path.is_dir() else path
    tensors, inside = read_any(file)
    class_names: list[str] = []
    values: dict = {}
    if file.name == WEIGHTS_FILE:
        class_names, values = _read_config(file.with_name("config.json"))
    model = model or values.get("model")
    if not model:
        problem = f"{flag} {found}: does not name the model of its tensors"
        raise UserError(problem, "add --model NAME")
    name = f"{found} ({inside})" if inside else found
    return InitialWeights(name, tensors, class_names, input_of_weights(model, tensors) | values)


def input_of_weights(model: str, tensors: Mapping[str, Tensor]) -> dict:
    """The settings of the input of these tensors, and the model if it has published weights.

    The number of channels is that of the first convolution in `tensors`. It is found by its kernel
    for one or three channels, because the names may differ. Only depthwise convolutions also have
    such kernels, for one channel.
    """
    values = published_input(model)
    if values:
        values |= {"model": model, "stem": "standard"}
    inputs = {kernel.shape[1] for kernel in tensors.values() if kernel.ndim == 4} & {1, 3}
    if inputs:
        values["channels"] = max(inputs)
    return values


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
