"""Bounds of the settings. A value outside them raises UserError."""

import math
import os
from typing import Any

from utils.errors import UserError

_WEEK = 7 * 24 * 3600  # seconds; gloo and the store count milliseconds
_COUNTS = (
    *("max_train_samples", "max_eval_samples", "image_size", "eval_size", "epochs", "max_steps", "batch_size"),
    *("global_batch_size", "grad_accum", "save_every", "keep", "eval_every", "log_every", "eval_batch_size", "threads"),
    *("repeats", "microbatches", "update", "lr_per", "top"),
)
_NOT_NEGATIVE = (
    *("crop_padding", "weight_decay", "momentum", "warmup_steps", "cooldown_steps", "label_smoothing", "num_workers"),
    *("color_jitter", "random_erasing", "cutout", "mixup", "cutmix", "mix_prob", "mix_off_epoch"),
    *("microbatch", "slow", "drop_path"),
)
_AT_LEAST = dict.fromkeys(_COUNTS, 1) | dict.fromkeys(_NOT_NEGATIVE, 0) | {"early_stopping": 1, "average": 1}
_FRACTIONS = ("min_scale", "eval_crop")
_ABOVE = dict.fromkeys(("pos_weight", "threshold", "max_seconds", "ema_decay"), 0)
_ABOVE |= dict.fromkeys(("lr", "std", "eval_fraction", "save_seconds", "clip_norm", "clip_value"), 0)
_ABOVE |= dict.fromkeys(("layer_decay", "timeout", *_FRACTIONS), 0)
_BELOW = dict.fromkeys(("momentum", "label_smoothing", "eval_fraction", "threshold", "drop_path"), 1)
_AT_MOST = {"crop_padding": 1024, "grad_accum": 2**16, "microbatches": 2**16, "seed": 2**63 - 1}
_AT_MOST |= dict.fromkeys(("image_size", "eval_size"), 2**16 - 1)
_AT_MOST |= dict.fromkeys(_FRACTIONS, 1) | {"batch_size": 2**24, "global_batch_size": 2**24, "timeout": _WEEK}
_AT_MOST |= {"color_jitter": 100, "random_erasing": 1, "cutout": 2**16 - 1}
_AT_MOST |= {"layer_decay": 1, "mixup": 1000, "cutmix": 1000, "mix_prob": 1}
_BELOW |= {"ema_decay": 1}
_LARGEST_INTEGER = 2**31 - 1  # if there is no other limit


def check_ranges(config: Any) -> None:
    """Raise UserError for a number, alone or in a list, that is not finite or is outside its bounds."""
    for name, value in vars(config).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(name, number)


def _check_number(name: str, number: int | float) -> None:
    huge = isinstance(number, int) and abs(number) >= 10**30
    got = f"got an integer of {len(str(abs(number)))} digits" if huge else f"got {number}"
    least, above, below = _AT_LEAST.get(name), _ABOVE.get(name), _BELOW.get(name)
    most = _AT_MOST.get(name, _LARGEST_INTEGER if isinstance(number, int) else None)
    require(not isinstance(number, float) or math.isfinite(number), f"--{name} must be a finite number, {got}")
    require(least is None or number >= least, f"--{name} must be at least {least}, {got}")
    require(above is None or number > above, f"--{name} must be above {above}, {got}")
    require(below is None or number < below, f"--{name} must be below {below}, {got}")
    unit = " seconds (a week)" if name == "timeout" else ""
    require(most is None or number <= most, f"--{name} must be at most {most}{unit}, {got}")
    require(most is None or number >= -most, f"--{name} must be at least {-(most or 0)}, {got}")


def check_sizes(config: Any) -> None:
    """Raise UserError for a size in pixels that is a list of anything but two numbers."""
    for name in ("image_size", "eval_size"):
        size = getattr(config, name, None)
        fits = not isinstance(size, list) or len(size) == 2
        problem = f"--{name} must be one number, or the height and the width, got {size}"
        require(fits, problem, f"for example --{name} 160 224")


def check_steps(name: str, steps: int | float | None) -> None:
    """Raise UserError for a number of updates that is neither an integer nor a fraction of the run."""
    fits = steps is None or steps < 1 or steps == int(steps)
    problem = f"--{name} must be an integer, or below 1 for a fraction of the run, got {steps}"
    require(fits, problem)


def check_run_name(name: str | None) -> None:
    """Raise UserError unless the name is a valid folder name that can be typed and printed easily."""
    if name is None:
        return
    problems = {
        "is empty": not name,
        "has a slash": "/" in name,
        "begins with a dot": name.startswith("."),
        "begins with a dash": name.startswith("-"),
        "has characters that cannot be printed": not name.isprintable(),
        "is longer than 200 bytes": len(os.fsencode(name)) > 200,  # the limit is 255; longer names are derived from it
    }
    for problem, applies in problems.items():
        require(not applies, f"--run_name {name[:60]!r} {problem}", "use a plain name, such as mnist-1")


def check_microbatches(config: Any) -> None:
    """Raise UserError unless --microbatches is a power of two, and no other setting contradicts it."""
    number = config.microbatches
    below = 1 << (number.bit_length() - 1)
    near = f"use {below} or {2 * below}"
    require(number == below, f"--microbatches must be a power of two, got {number}", near)
    for flag, reason in (
        ("batch_size", "the global batch is divided into the microbatches"),
        ("grad_accum", "each process computes its share of the microbatches"),
        ("sync_batchnorm", "batch statistics are those of a microbatch"),
    ):
        require(not getattr(config, flag), f"--{flag} cannot be used with --microbatches: {reason}", "leave it out")
    hook = f"--comm_hook {config.comm_hook} cannot be used with --microbatches: it rounds gradients"
    require(config.comm_hook == "no", hook, "leave it out")


def require(condition: bool, problem: str, fix: str = "") -> None:
    """Raise UserError with this problem and fix unless the condition holds."""
    if not condition:
        raise UserError(problem, fix)
