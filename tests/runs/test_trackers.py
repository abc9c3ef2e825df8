"""--report_to: trackers have the points of log.jsonl, each once, also after a kill and a resume."""

import atexit
import json
import os
import signal
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import tracking
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, LoggerType
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    kill_myself,
    records,
    refused,
    slow_train,
    steps,
    train_run,
    train_watched,
    words,
)
from helpers.waiting import has_logged, records_so_far, until

import train
from utils.runs.trackers import numbers_to_send, settings_to_send
from utils.settings.train import TrainConfig

FLAGS = words("--model mlp --max_train_samples 240 --global_batch_size 24 --threads 1 --lr 0.01")
FLAGS += words("--max_steps 12 --log_every 1 --eval_every 5 --save_every 4 --output_dir runs")
TENSORBOARD = ["--run_name", "run", *FLAGS, "--report_to", "tensorboard"]
SENT = Path("sent.jsonl")


def points_of_log() -> dict[str, list]:
    """The numbers of the log's train and eval records: [(update, float32)] by kind/name."""
    points = defaultdict(list)
    for record in records("run"):
        for key in record.keys() - {"kind", "step"} if record["kind"] in ("train", "eval") else ():
            if type(record[key]) in (int, float):
                points[f"{record['kind']}/{key}"].append((record["step"], np.float32(record[key])))
    return dict(points)


def points_of_tensorboard(folder: Path) -> dict[str, list]:
    """The same from TensorBoard's event files, without what it hides."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, np.float32(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def steps_of(name: str, points: dict[str, list]) -> list[int]:
    return [step for step, _ in points.get(name, [])]


def start_fake_wandb(**options) -> SimpleNamespace:
    """A run in W&B, which is kept in a file. A step that an earlier start has sent is ignored."""
    before = records_so_far(SENT)
    first = max((entry["step"] for entry in before if "step" in entry), default=-1) + 1
    append(options)

    def send(values: dict, step: int) -> None:
        append({"step": step, **values} if step >= first else {"ignored": step})

    return SimpleNamespace(id=options["id"], starting_step=first, log=send, finish=lambda: None)


def append(entry: dict) -> None:
    with SENT.open("a") as file:
        print(json.dumps(entry), file=file)


def hold_at_7(*flags: str) -> None:
    slow_train([*FLAGS, *flags], hold_at=7)


@pytest.mark.full
def test_after_a_kill_and_a_resume_trackers_show_each_point_of_the_log_once(monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", list(LoggerType))
    changed = SimpleNamespace(update=lambda values, **_: None)
    fake = SimpleNamespace(init=start_fake_wandb, config=changed)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "pets")
    folder = Path("runs/run/tensorboard/pets")
    to = ["--report_to", "tensorboard, wandb"]
    launch = start_ranks(2, hold_at_7, *to)
    until(has_logged(7))
    until(lambda: folder.exists() and 7 in steps_of("train/loss", points_of_tensorboard(folder)))
    until(lambda: records_so_far(SENT)[-1].get("step") == 7)
    launch.kill(signal.SIGKILL)
    launch.finish()
    # With another interval, a point of update 7 would be one of the killed start.
    train_run(2, "run", *FLAGS, *to, *words("--resume auto --log_every 3"))
    expected = points_of_log()
    assert steps_of("train/loss", expected) == [1, 2, 3, 4, 5, 6, 9, 12]
    assert steps_of("eval/accuracy", expected) == [5, 10, 12]
    assert points_of_tensorboard(folder) == expected
    settings = max(folder.glob("*/hparams.yml")).read_text()
    assert "log_every: 3\n" in settings and "processes: 2\n" in settings
    assert os.getcwd() not in settings and "output_dir" not in settings
    sent = records_so_far(SENT)
    # only updates between the checkpoint and the kill: earlier ones are not sent again
    assert {entry["ignored"] for entry in sent if "ignored" in entry} in ({6}, {5, 6})
    first, second = [entry for entry in sent if "project" in entry]
    assert first == second and first["resume"] == "allow" and first["project"] == "pets"
    assert len(first["id"]) == 32 and first["settings"]["x_disable_meta"]
    assert [entry["step"] for entry in sent if "train/loss" in entry] == [*range(1, 8), 9, 12]
    assert [entry["step"] for entry in sent if "eval/loss" in entry] == [5, 10, 12]


class FakeMLflow(SimpleNamespace):
    """MLflow's module, whose runs are kept in a file."""

    def __init__(self):
        limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
        super().__init__(utils=SimpleNamespace(validation=limits), active=False)
        atexit.register(self.end_run)  # as MLflow does

    def search_experiments(self, filter_string: str) -> list:
        return []

    def create_experiment(self, name: str, **_) -> str:
        return name

    def start_run(self, run_name: str, experiment_id: str, **_) -> None:
        self.active = True
        append({"name": run_name, "project": experiment_id})

    def log_params(self, values: dict) -> None:
        pass

    def log_metrics(self, values: dict, step: int) -> None:
        append({"step": step})

    def end_run(self, status: str = "FINISHED") -> None:
        if self.active:
            append({"status": status})
        self.active = False


def _train_with_mlflow(event: str, flags: list[str]) -> None:
    """Train with MLflow; at update 5, this happens. Exit handlers are called, as in a script."""
    sys.modules["mlflow"] = FakeMLflow()
    tracking._available_trackers.append(LoggerType.MLFLOW)

    def act(run):
        if run.state.step == 5 and event == "signal":
            kill_myself(signal.SIGTERM)
        if run.state.step == 5 and event == "nan":
            next(run.module.parameters()).data.fill_(np.nan)

    try:
        train_watched([*FLAGS, "--report_to", "mlflow", *flags], act)
    finally:
        atexit._run_exitfuncs()


@pytest.mark.full
@pytest.mark.parametrize(
    ("event", "code", "status"),
    [("none", 0, "FINISHED"), ("signal", 75, "KILLED"), ("nan", 2, "FAILED")],
)
def test_a_run_in_mlflow_has_the_name_and_the_end_of_the_run(event, code, status):
    (outcome,) = run_ranks(1, _train_with_mlflow, event, [])
    assert outcome.code == code, outcome.err
    first, *points, last = records_so_far(SENT)
    assert first == {"name": "run", "project": "lockstep"}
    assert points and last == {"status": status}


def train_with_clock(ahead: float, *flags: str) -> None:
    """Train on a machine whose clock is this many seconds ahead."""
    now = time.time
    time.time = lambda: now() + ahead
    train.main([*TENSORBOARD, *flags])


@pytest.mark.full
def test_tensorboard_shows_all_points_after_resumes_on_clocks_that_are_behind():
    """It reads files in the order of their names, which begin with the time."""
    clocks = {4: 9e7, 8: 0.0, 10: -9e7, 12: -5e7}
    for last, ahead in clocks.items():
        flags = words(f"--max_steps {last} --resume auto")
        returned(1, train_with_clock, ahead, *flags)
        (folder,) = Path("runs/run/tensorboard").iterdir()
        assert points_of_tensorboard(folder) == points_of_log()
        assert len(list(folder.glob("*tfevents*"))) == len([n for n in clocks if n <= last])
    assert steps_of("train/loss", points_of_log()) == [*range(1, 13)]


class Failing(GeneralTracker):
    """Appends what it gets to a file; cannot send update 3 while there is a file `offline`."""

    name, requires_logging_directory, tracker = "tensorboard", True, None

    def __init__(self, *_, **__):
        super().__init__()
        SENT.unlink(missing_ok=True)

    def log(self, values: dict, step: int | None = None) -> None:
        if step == 3 and Path("offline").exists():
            raise ConnectionError("no\nnetwork")
        append({"step": step, **values})

    def finish(self) -> None:
        Path("finished").touch()
        raise ConnectionError("still none")


@pytest.mark.full
def test_a_tracker_that_fails_does_not_end_the_run_and_the_next_start_sends_all(monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Failing)
    Path("offline").touch()
    outcomes = run_ranks(2, train.main, [*TENSORBOARD, "--max_steps", "6"])
    assert [(outcome.code, outcome.err) for outcome in outcomes] == [(0, ""), (0, "")]
    said = [line for line in outcomes[0].out.splitlines() if "report_to" in line]
    assert said == ["--report_to tensorboard: no network; the run continues without trackers"]
    assert [record["step"] for record in records_so_far(SENT)] == [1, 2]
    assert Path("finished").exists()
    assert steps("run", "train") == list(range(1, 7))
    Path("offline").unlink()
    returned(2, train.main, [*TENSORBOARD, "--resume", "auto"])
    sent = [(list(entry)[1].split("/")[0], entry["step"]) for entry in records_so_far(SENT)]
    kinds = [(r["kind"], r["step"]) for r in records("run") if r["kind"] in ("train", "eval")]
    assert sent == kinds and len(kinds) == 12 + 4


def test_the_finite_numbers_of_a_record_are_sent():
    numbers = {"loss": 0.5, "count": 4}
    odd = {"list": [1.0], "flag": True, "text": "a", "none": None, "bad": float("inf"), "step": 3}
    assert numbers_to_send("train", numbers | odd) == {"train/loss": 0.5, "train/count": 4}
    for weights, kind in (("raw", "eval"), ("ema", "eval_ema")):
        sent = {f"{kind}/loss": 0.5, f"{kind}/count": 4}
        assert numbers_to_send("eval", {"weights": weights, **numbers}) == sent


def test_only_changed_settings_are_sent_and_no_folder_or_host_name():
    places = {"output_dir": "out", "cache_dir": "/c", "init_method": "tcp://host:1"}
    places |= {"interface": "eth0", "run_name": "client", "cpu": True, "threads": 1}  # of one start
    named = {"data": "/home/someone/pets", "init_from": "~/weights.safetensors"}
    config = replace(TrainConfig(**named, **places), optimizer_args={"betas": [0.9, 0.95]})
    sent = {"data": "pets", "init_from": "weights.safetensors", "optimizer": "adamw"}
    sent["optimizer_args"] = "{'betas': [0.9, 0.95]}"
    assert settings_to_send(config) == sent and settings_to_send(TrainConfig()) == {}


def test_an_unknown_tracker_or_one_without_its_package_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    wrong = "--report_to tensorbord: no such tracker; did you mean tensorboard?"
    assert wrong in refused(train.main, "--report_to", "tensorbord")
    missing = "--report_to mlflow: its package is not installed; pip install mlflow"
    assert missing in refused(train.main, "--report_to", " mlflow,wandb", processes=2)
    assert not Path("runs").exists()


@pytest.mark.full
def test_only_a_run_starts_its_tracker_and_one_that_cannot_be_started_ends_all_ranks(monkeypatch):
    class NotLoggedIn(Failing):
        def start(self):  # as in W&B, not a ValueError
            raise type("UsageError", (Exception,), {})("no API key\nconfigured")

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", NotLoggedIn)
    returned(1, train.main, [*TENSORBOARD, "--dry_run"])
    problem = "--report_to tensorboard: a tracker cannot be started (no API key configured)"
    line = refused(train.main, *FLAGS, "--report_to", "tensorboard", processes=2)
    assert line.startswith(f"train.py: error: {problem}; ")
