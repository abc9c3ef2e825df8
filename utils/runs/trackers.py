"""Experiment trackers, such as TensorBoard (--report_to). Accelerate starts them and sends to them.

They follow log.jsonl: each start sends the records before a resume again, because the last start
may not have sent all of them.
"""

import atexit
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from utils.config import Registry, require, suggestion
from utils.console import say
from utils.errors import UserError, one_line
from utils.runs.log import read_log
from utils.settings.train import OF_ONE_START, TrainConfig

# Folders and addresses of this machine are private, and of no use elsewhere.
_NOT_SENT = {*OF_ONE_START, "output_dir", "data_dir", "cache_dir", "report_to"}


class Trackers(Registry):
    """The trackers of --report_to, by their names in Accelerate."""

    def check(self, config: Any) -> None:
        """Raise UserError for an unknown tracker, or for one whose package is not installed."""
        for name in config.trackers:
            fix = suggestion(name, self, f"use {self.describe_values()}")
            require(name in self, f"--report_to {name}: no such tracker", fix)
            problem = f"--report_to {name}: its package is not installed"
            require(name in map(str, get_available_trackers()), problem, f"pip install {name}")

    def helps(self) -> dict[str, str]:
        return {self.what: f": {self.describe_values()}"}


TRACKERS = Trackers("report_to", LOGGER_TYPE_TO_CLASS)


# By default W&B sends the host name, the command, git's remote and what is printed.
_OF_WANDB = {
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "console": "off",
    "host": "unknown",
}


@dataclass
class RunTrackers:
    """Starts and finishes the trackers of a run; `Accelerator.log` sends numbers to them.

    Only the main process has trackers.
    """

    accelerator: Accelerator
    config: TrainConfig
    folder: Path
    run_id: str

    def start(self, topology: Mapping) -> None:
        """Start the trackers and send what log.jsonl has; called on the main process.

        Raises UserError if a tracker cannot be started.
        """
        accelerator = self.accelerator
        folder = self.folder
        names = self.config.trackers
        if not names:
            return
        projects = [os.environ.get(f"{name.upper()}_PROJECT") for name in names]
        project = next(filter(None, projects), "lockstep")
        accelerator.project_configuration.logging_dir = str(folder / "tensorboard")
        # TensorBoard then hides the points of earlier starts, and a run in W&B continues. Other
        # trackers add a run, which has all records.
        name = {"name": folder.name}
        options = {
            "tensorboard": {"purge_step": 0},
            "trackio": name,
            "wandb": name | {"id": self.run_id, "resume": "allow", "settings": _OF_WANDB},
            "mlflow": {"run_name": folder.name},
        }
        settings = settings_to_send(self.config) | as_scalars(topology)
        try:
            # TensorBoard reads files in the order of their names, which begin with the time, and
            # the clock may be behind that of an earlier start
            for earlier in folder.rglob("*.tfevents.[1-9]*"):
                earlier.rename(str(earlier).replace(".tfevents.", ".tfevents.0"))
            accelerator.init_trackers(project, settings, options)
        except Exception as error:  # of any class, as trackers are other people's code
            problem = f"a tracker cannot be started ({one_line(error)[:200]})"
            fix = "correct its settings, log in to it, or leave it out"
            raise UserError(f"--report_to {self.config.report_to}: {problem}", fix) from error
        if "mlflow" in names:
            import mlflow

            atexit.register(mlflow.end_run, "FAILED")  # unless `close` has ended it
        with self.guarded():
            for tracker in accelerator.trackers:
                # W&B has the earlier updates, and would warn about each
                first = tracker.tracker.starting_step if tracker.name == "wandb" else 0
                for record in read_log(folder):
                    kind = record["kind"]
                    if kind in ("train", "eval", "rung") and record["step"] >= first:
                        tracker.log(numbers_to_send(kind, record), step=record["step"])

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """After an error of any class in the block, the run continues without trackers."""
        trackers = self.accelerator.trackers
        try:
            yield
        except Exception as error:
            what = f"--report_to {self.config.report_to}"
            say(f"{what}: {one_line(error)}; the run continues without trackers")
            while trackers:
                with suppress(Exception):
                    trackers.pop().finish()

    def close(self, status: str) -> None:
        """Finish the trackers, and a run in MLflow with this status.

        `Accelerator.end_training` would also end the process group.
        """
        with self.guarded():
            while self.accelerator.trackers:
                tracker = self.accelerator.trackers.pop()
                if tracker.name == "mlflow":
                    import mlflow

                    mlflow.end_run(status)
                tracker.finish()


def numbers_to_send(kind: str, values: Mapping) -> dict[str, float]:
    """The finite numbers of a train, eval or rung record, as kind/name."""
    # With --ema_decay, an update has two evaluations.
    kind += "_ema" if values.get("weights") == "ema" else ""
    return {
        f"{kind}/{name}": value
        for name, value in values.items()
        if name != "step" and type(value) in (int, float) and math.isfinite(value)
    }


def settings_to_send(config: TrainConfig) -> dict:
    """The settings that differ from their defaults, without folders and host names."""
    default = vars(TrainConfig())
    return as_scalars(
        {
            name: value
            for name, value in vars(config).items()
            if name not in _NOT_SENT and value != default[name]
        }
    )


def as_scalars(values: Mapping) -> dict:
    """The values as numbers and strings, as trackers take them; of an absolute path only the last
    part.
    """

    def scalar(value: Any) -> Any:
        text = Path(value).name if str(value).startswith(("/", "~")) else str(value)
        return value if isinstance(value, int | float) else text

    return {name: scalar(value) for name, value in values.items()}
