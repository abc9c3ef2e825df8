"""Bounds of the settings; a value outside them raises ValueError."""

import math
import os
from collections.abc import Sequence

_LONGEST = 7 * 24 * 3600  # seconds of a timeout; gloo and the store count milliseconds


_MOST = {"crop_padding": 1024, "grad_accum": 2**16, "image_size": 2**16 - 1, "seed": 2**63 - 1}


COUNTS = [
    "max_train_samples",
    "max_eval_samples",
    "image_size",
    "epochs",
    "max_steps",
    "global_batch_size",
    "batch_size",
    "grad_accum",
    "save_every",
    "keep",
    "eval_every",
    "log_every",
    "eval_batch_size",
    "threads",
]


def check_run_name(name: str | None) -> None:
    """Raise ValueError unless it is a valid folder name that is easy to type and to print."""
    if name is None:
        return
    wrong = {
        "is empty": not name,
        "has a slash": "/" in name,
        "begins with a dot": name.startswith("."),
        "begins with a dash": name.startswith("-"),
        "has characters that cannot be printed": not name.isprintable(),
        "is longer than 200 bytes": len(os.fsencode(name)) > 200,  # 255 is the limit; longer names derive from it
    }
    for what, applies in wrong.items():
        require(not applies, f"--run_name {name[:60]!r} {what}; give a plain name, such as mnist-1")


def check_ranges(config, at_least_one: Sequence[str], at_least_zero: Sequence[str]) -> None:
    for names, least in ((at_least_one, 1), (at_least_zero, 0)):
        for name in names:
            value = getattr(config, name)
            require(value is None or value >= least, f"--{name} must be at least {least}, not {value}")
    for name, value in vars(config).items():
        for number in value if isinstance(value, list) else [value]:
            require(not isinstance(number, float) or math.isfinite(number), f"--{name} must be a finite number")
        most = _MOST.get(name, 2**31 - 1)
        if type(value) is int and abs(value) > most:
            text = str(value) if abs(value) < 10**30 else f"an integer of {len(str(abs(value)))} digits"
            raise ValueError(f"--{name} must be at most {most}, not {text}")
    workers = getattr(config, "num_workers", None)
    require(workers is None or workers >= 0, "--num_workers must be at least 0")
    require(config.timeout > 0, "--timeout must be above 0 seconds")
    require(config.timeout <= _LONGEST, f"--timeout must be at most {_LONGEST} seconds (a week), not {config.timeout}")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
