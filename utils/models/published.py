"""Published weights of torchvision's and timm's models: the input that they expect, and errors in loading them."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torchvision

from utils.config.settings import TrainConfig
from utils.data.decode import EVAL_CROP
from utils.data.spec import InputSpec
from utils.errors import UserError, one_line


def published_input(name: str) -> dict:
    """The input of the published weights: channels, size, mean, std, and how evaluation crops photographs."""
    if name.startswith("timm/"):
        import timm

        cfg = timm.get_pretrained_cfg(name[5:])
        if cfg is None:
            return {}
        interpolation = "bicubic" if cfg.interpolation == "bicubic" else "bilinear"
        crop = {"crop": cfg.crop_pct, "interpolation": interpolation, "squash": cfg.crop_mode == "squash"}
        return {"channels": cfg.input_size[0], "size": cfg.input_size[1], "mean": cfg.mean, "std": cfg.std, **crop}
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    crop = {"crop": preset.crop_size[0] / preset.resize_size[0], "interpolation": preset.interpolation.value}
    return {"channels": 3, "size": preset.crop_size[0], "mean": preset.mean, "std": preset.std, **crop}


def sized(spec: InputSpec, config: TrainConfig, size: tuple[int, int]) -> InputSpec:
    """The input with this height and width, and with the resizing of photographs that it needs."""
    weights = published_input(config.model) if config.pretrained else {}
    spec = InputSpec(*size, spec.channels, spec.mean, spec.std)
    if not spec.small:  # small images are resized once, for the cache, with bilinear interpolation
        spec = replace(spec, **{key: weights[key] for key in ("interpolation", "squash") if key in weights})
    return spec.cropped(config.eval_crop or weights.get("crop") or EVAL_CROP)


@contextmanager
def loading_weights(config: TrainConfig) -> Iterator[None]:
    """Turn any error of downloading or loading weights into one UserError."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        problem = f"--pretrained: the weights of {config.model} cannot be loaded ({one_line(error)[:200]})"
        raise UserError(problem, _fix_of_weights(config)) from error


def _fix_of_weights(config: TrainConfig) -> str:
    """What to do if published weights cannot be loaded."""
    fixes = ["leave out --model_args"] * bool(config.model_args)
    if config.model.startswith("timm/"):
        import timm
        from huggingface_hub.constants import HF_HUB_CACHE

        cfg = timm.get_pretrained_cfg(config.model[5:])
        get = f"download {cfg.url if cfg else 'them'}"
        get = f"run `hf download {cfg.hf_hub_id}`" if cfg and cfg.hf_hub_id else get
        return ", or ".join([*fixes, f"without a network, {get} elsewhere and copy the files to {HF_HUB_CACHE}"])
    url = torchvision.models.get_model_weights(config.model).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    fixes.append(f"delete {path} if it is damaged" if path.exists() else f"without a network, save {url} as {path}")
    return ", or ".join(fixes)
