"""Experiment trackers, such as TensorBoard, as sinks of log.jsonl (--report_to). Accelerate has a class for each.

`Accelerator.init_trackers` starts all trackers together, and `Accelerator.log` stops at the first that fails. Here each
tracker is a sink of its own, so that an error of one does not stop the others.
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, LoggerType, get_available_trackers

from utils.config.bounds import require
from utils.config.settings import OF_ONE_START, TrainConfig
from utils.config.table import Table, suggestion
from utils.errors import UserError, one_line
from utils.files import write_file
from utils.runs.log import Sink

# Folders and addresses of this machine are private, and of no use elsewhere.
_NOT_SENT = {*OF_ONE_START, "output_dir", "data_dir", "cache_dir", "report_to"}


class Trackers(Table):
    """The trackers of --report_to, by their names in Accelerate."""

    def check(self, config: Any) -> None:
        """Raise UserError for an unknown tracker, or for one whose package is not installed."""
        missing = {*map(str, LoggerType)} - {*map(str, get_available_trackers())}
        for name in self.names(config):
            fix = suggestion(name, self, f"use {self.describe_values()}")
            require(name in self, f"--report_to {name}: no such tracker", fix)
            problem = f"--report_to {name}: its package is not installed"
            require(name not in missing, problem, f"run: python -m pip install {name}")

    def helps(self) -> dict[str, str]:
        return {self.what: f": {self.describe_values()}"}

    def names(self, config: Any) -> list[str]:
        """The trackers in --report_to, each once."""
        return list(dict.fromkeys((config.report_to or "").replace(",", " ").split()))

    def sinks(self, config: TrainConfig) -> dict[str, Callable[..., Sink]]:
        """Functions that create the sinks of these settings, as those in `SINKS`."""
        return {name: partial(Tracker, name, self[name], config) for name in self.names(config)}


TRACKERS = Trackers("report_to", LOGGER_TYPE_TO_CLASS)


class Tracker(Sink):
    """A tracker of Accelerate, which gets the numbers of each record.

    A resumed run first sends the records before the resume again, because a killed run may not have sent all of them.
    `_options` deletes or continues the tracker's run of an earlier start, so that it has no record twice.
    """

    def __init__(self, name: str, tracker_class: Any, config: TrainConfig, folder: Path, *_: object):
        self.log, self.settings = folder / "log.jsonl", settings_to_send(config)
        project = os.environ.get(f"{name.upper()}_PROJECT") or "lockstep"
        kept = folder / f"{name}.id"  # the id of the run in the tracker
        try:
            options = _options(name, folder, project, kept.read_text() if kept.exists() else None)
            # TensorBoard's project is the folder of its files.
            places = [folder] if tracker_class.requires_logging_directory else []
            self.tracker = tracker_class("tensorboard" if name == "tensorboard" else project, *places, **options)
            self.tracker.start()
        except Exception as error:  # of any class, as trackers are other people's code
            problem = f"--report_to {name}: the tracker cannot be started ({one_line(error)[:200]})"
            raise UserError(problem, "correct its settings, log in to it, or leave it out") from error
        if name in ("trackio", "wandb"):
            write_file(kept, self.tracker.tracker.id)
        # W&B cannot delete points, and ignores steps that it already has.
        self.first = getattr(self.tracker.tracker, "starting_step", 0)

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "start":  # the first record of a start
            topology = {name: value for name, value in record.items() if name not in ("kind", "step", "time")}
            self.tracker.store_init_configuration(self.settings | flatten(topology))
            for line in self.log.read_text(encoding="utf-8").splitlines():  # the records before a resume
                self._send(json.loads(line))
        else:
            self._send(record)

    def close(self) -> None:
        self.tracker.finish()

    def _send(self, record: Mapping[str, Any]) -> None:
        if record["kind"] in ("train", "eval") and record["step"] >= self.first:
            # With --ema_decay, an update has two evaluations.
            kind = "eval_ema" if record.get("weights") == "ema" else record["kind"]
            numbers = {name: value for name, value in record.items() if type(value) in (int, float) and name != "step"}
            finite = {f"{kind}/{name}": value for name, value in numbers.items() if math.isfinite(value)}
            self.tracker.log(finite, step=record["step"])


def settings_to_send(config: TrainConfig) -> dict[str, bool | int | float | str]:
    """The settings that differ from their defaults, without folders and host names."""
    default = vars(TrainConfig())
    return flatten({name: v for name, v in vars(config).items() if v != default[name] and name not in _NOT_SENT})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested values as {"outer/inner": scalar}. A list becomes text; only the last part of an absolute path is kept."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float):
            flat[prefix + name] = value
        else:
            text = str(value)
            flat[prefix + name] = Path(text).name if text.startswith(("/", "~")) else text
    return flat


def _options(name: str, folder: Path, project: str, before: str | None) -> dict[str, Any]:
    """The options of a tracker; `before` is the id of its run in an earlier start, which is continued or deleted.

    For trackers that are not named here, a resumed run is a new run, which has the records before the resume too.
    """
    if name == "tensorboard":
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # NFS keeps files that are open, under other names
        for left in (folder / "tensorboard").rglob("*tfevents*"):
            raise OSError(f"{left} cannot be deleted")
    if name == "trackio":
        import trackio

        with suppress(ValueError):  # this machine has no runs of the project: the earlier start was on another one
            for run in trackio.Api().runs(project) if before else ():
                if run.id == before:
                    run.delete()
        return {"name": folder.name}
    if name == "wandb":
        # By default W&B sends the host name, the command, git's remote and what is printed.
        more = {"console": "off", "host": "unknown"}
        settings = {"x_disable_meta": True, "disable_git": True, "disable_code": True, **more}
        return {"name": folder.name, "id": before or uuid.uuid4().hex, "resume": "allow", "settings": settings}
    return {}
