"""--report_to: trackers have the points of log.jsonl, each once, also after a kill and a resume."""

import os
import signal
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate.tracking import GeneralTracker
from helpers.ranks import returned, start_ranks
from helpers.training_runs import records, refused, slow_train
from helpers.waiting import has_logged, records_so_far, until

import replay
import train
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.runs.log import SINKS, RunLog
from utils.runs.state import TrainState
from utils.runs.trackers import TRACKERS, Tracker, settings_to_send
from utils.tasks.classification import Classification

FLAGS = ["--model", "mlp", "--max_train_samples", "240", "--global_batch_size", "24", "--threads", "1"]
FLAGS += ["--lr", "0.01", "--max_steps", "12", "--log_every", "1", "--eval_every", "5", "--save_every", "4"]
FLAGS += ["--output_dir", "runs"]
TASK = Classification(TrainConfig(), ["a", "b"])


def points_of_log(name: str) -> dict[str, list]:
    """The numbers of the log's train and eval records: [(update, float32)] by kind/name."""
    points = defaultdict(list)
    for record in records(name):
        for key in record.keys() - {"kind", "step"} if record["kind"] in ("train", "eval") else ():
            if type(record[key]) in (int, float):
                points[f"{record['kind']}/{key}"].append((record["step"], np.float32(record[key])))
    return dict(points)


def points_of_tensorboard(folder: Path) -> dict[str, list]:
    """The same from TensorBoard's event files. They must not have a step twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Without purging, it keeps all points of all files, not only those that TensorBoard shows.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, np.float32(event.value)) for event in events.Scalars(tag)] for tag in tags}


def hold_at_7(*flags: str) -> None:
    slow_train([*FLAGS, *flags], hold_at=7)


def test_tensorboard_has_the_points_of_the_log_after_a_kill_and_a_resume():
    folder = Path("runs/run/tensorboard")
    launch = start_ranks(2, hold_at_7, "--report_to", "tensorboard")
    until(has_logged(7))
    until(lambda: folder.exists() and (7, "train/loss") in steps(folder))
    launch.kill(signal.SIGKILL)
    launch.finish()
    # With another interval, a point of update 7 would be one of the killed start.
    flags = ["--run_name", "run", *FLAGS, "--resume", "auto", "--report_to", "tensorboard", "--log_every", "3"]
    returned(2, train.main, flags)
    expected = points_of_log("run")
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 3, 4, 5, 6, 9, 12]
    assert [step for step, _ in expected["eval/accuracy"]] == [5, 10, 12]
    assert points_of_tensorboard(folder) == expected
    assert len(list(folder.glob("events.*"))) == 1  # of rank 0 of the resumed start
    settings = next(folder.glob("*/hparams.yml")).read_text()
    assert "log_every: 3\n" in settings and "processes: 2\n" in settings and "versions/torch: " in settings
    assert os.getcwd() not in settings and "output_dir" not in settings


def steps(folder: Path) -> list[tuple[int, str]]:
    return [(step, tag) for tag, points in points_of_tensorboard(folder).items() for step, _ in points]


class Fake(GeneralTracker):
    """Keeps what it gets, and fails at update 2 if its project is that of a failing one."""

    name, requires_logging_directory, main_process_only = "fake", False, False
    made: dict[str, list] = {}  # noqa: RUF012
    options: list[dict] = []  # noqa: RUF012
    starting_step = 0

    def __init__(self, project: str, **options):
        super().__init__()
        self.got, self.fails = self.made.setdefault(project, []), project == "failing"
        self.options.append(options)
        self.id = options.get("id", "new")

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values: dict) -> None:
        self.got.append(values)

    def log(self, values: dict, step: int | None = None) -> None:
        if self.fails and step == 2:
            raise ConnectionError("no network")
        self.got.append((step, values))

    def finish(self) -> None:
        self.got.append("finished")


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Opens a log with trackers of these names."""
    monkeypatch.setattr(Fake, "made", {})
    monkeypatch.setattr(Fake, "options", [])

    def open_log(*names: str, state: TrainState | None = None) -> RunLog:
        for name in names:
            monkeypatch.setenv(f"{name.upper()}_PROJECT", name)
        more = {name: partial(Tracker, name, Fake, TrainConfig(lr=0.5)) for name in names}
        return RunLog(tmp_path, True, state or TrainState(), 9, TASK, more)

    return open_log


def write_start(log: RunLog, step: int) -> None:
    log.write("start", step=step, processes=3, time=1.5, versions={"torch": "2"})


SETTINGS = {"lr": 0.5, "processes": 3, "versions/torch": "2"}
TRAIN = {"loss": 0.5, "lr": 0.1, "images_per_second": 1.0, "data_wait": 0.0, "seconds": 1.0, "epoch": 1}
SENT = {f"train/{name}": value for name, value in TRAIN.items()}


def test_a_tracker_gets_the_settings_the_finite_numbers_and_after_a_resume_the_kept_records(opened):
    log = opened("one")
    write_start(log, 0)
    odd = {"list": [1.0], "flag": True, "text": "a", "none": None}
    for step in (1, 2, 3):
        log.write("train", step=step, **TRAIN, bad=float("inf"), **odd)
    shared = {"epoch": 1, "split": "test", "count": 4, "accuracy": 0.5, "top5": 1.0, "loss": 1.0, "seconds": 1.0}
    for kind in ("raw", "ema"):
        log.write("eval", step=3, weights=kind, **shared)
    log.write("end", step=3, reason="max_seconds", number=2)
    log.close()
    *sent, (_, raw), (_, averaged), end = Fake.made["one"]
    assert sent == [SETTINGS, (1, SENT), (2, SENT), (3, SENT)] and end == "finished"
    assert raw["eval/accuracy"] == averaged["eval_ema/accuracy"] == 0.5 and not raw.keys() & averaged.keys()
    Fake.made.clear()
    log = opened("one", state=TrainState(step=2))
    write_start(log, 2)
    log.write("train", step=3, **TRAIN)
    assert Fake.made == {"one": [SETTINGS, (1, SENT), (2, SENT), (3, SENT)]}


def test_a_tracker_that_fails_stops_neither_the_run_nor_another_tracker(opened, capsys):
    log = opened("failing", "other")
    write_start(log, 0)
    for step in (1, 2, 3):
        log.write("train", step=step, **TRAIN)
    assert Fake.made["failing"] == [SETTINGS, (1, SENT), "finished"]
    assert Fake.made["other"] == [SETTINGS, (1, SENT), (2, SENT), (3, SENT)]
    assert [r["step"] for r in records_so_far(log.path)] == [0, 1, 2, 3]
    assert "sink failing: no network; the run continues without it" in capsys.readouterr().out.splitlines()


def test_a_resumed_run_continues_its_run_in_wandb_and_sends_only_what_is_missing_there(opened, tmp_path, monkeypatch):
    for resumed in (False, True):
        log = opened("wandb", state=TrainState(step=4 * resumed))
        write_start(log, 4 * resumed)
        for step in range(4 * resumed + 1, 7):
            log.write("train", step=step, **TRAIN)
        monkeypatch.setattr(Fake, "starting_step", 4)  # it has those up to update 3
    first, second = Fake.options
    assert first == second and first["resume"] == "allow" and len(first["id"]) == 32
    assert first["name"] == tmp_path.name and first["settings"]["x_disable_meta"]
    sent = [entry[0] for entry in Fake.made["wandb"] if isinstance(entry, tuple)]
    assert sent == [1, 2, 3, 4, 5, 6, 4, 5, 6]


def test_only_changed_settings_are_sent_and_no_folder_or_host_name():
    places = {"output_dir": "out", "cache_dir": "/c", "init_method": "tcp://host:1", "interface": "eth0"}
    places |= {"run_name": "client", "cpu": True, "threads": 1, "profile": True}  # of one start
    config = TrainConfig(data="/home/someone/pets", init_from="~/weights.safetensors", flip=False, **places)
    config = replace(config, optimizer_args={"betas": [0.9, 0.95]})
    sent = {"data": "pets", "init_from": "weights.safetensors", "optimizer": "adamw", "flip": False}
    sent["optimizer_args/betas"] = "[0.9, 0.95]"
    assert settings_to_send(config) == sent and settings_to_send(TrainConfig()) == {}


def test_an_unknown_tracker_or_one_without_its_package_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    wrong = "--report_to tensorbord: no such tracker; did you mean tensorboard?"
    assert wrong in refused(train.main, "--report_to", "tensorbord")
    missing = "--report_to mlflow: its package is not installed; run: python -m pip install mlflow"
    assert missing in refused(train.main, "--report_to", " mlflow,wandb", processes=2)
    assert not Path("runs").exists()


def test_a_list_of_trackers_names_each_sink_once():
    config = TrainConfig(report_to="trackio, tensorboard,trackio,")
    assert list(TRACKERS.sinks(config)) == ["trackio", "tensorboard"]
    assert TRACKERS.sinks(TrainConfig()) == {} and list(SINKS) == ["terminal"]


def test_only_a_run_starts_its_tracker_and_one_that_cannot_be_started_ends_all_ranks(monkeypatch):
    class NotLoggedIn(Fake):
        def __init__(self, *_, **__):
            raise type("UsageError", (Exception,), {})("no API key\nconfigured")  # as in W&B, not a ValueError

    monkeypatch.setitem(TRACKERS, "tensorboard", NotLoggedIn)
    flags = [*FLAGS, "--report_to", "tensorboard"]
    returned(1, train.main, [*flags, "--dry_run"])
    returned(1, train.main, ["--run_name", "run", *FLAGS, "--max_steps", "2"])
    settings = Path("runs/run/config.yaml")
    settings.write_text(settings.read_text().replace("report_to: null", "report_to: tensorboard"))
    returned(1, replay.main, ["--run", "runs/run", "--update", "2", "--cpu"])
    problem = "--report_to tensorboard: the tracker cannot be started (no API key configured)"
    assert refused(train.main, *flags, processes=2).startswith(f"train.py: error: {problem}; ")


def test_a_run_of_trackio_is_deleted_on_its_own_machine_and_missed_on_another(opened, tmp_path, monkeypatch):
    runs = {"trackio": ["mine", "other"]}

    class Api:
        def runs(self, project: str) -> list:
            if project not in runs:
                raise ValueError(f"Project '{project}' does not exist")  # as trackio
            own = runs[project]
            return [SimpleNamespace(id=name, delete=partial(own.remove, name)) for name in own]

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Api=Api))
    for _ in range(2):
        (tmp_path / "trackio.id").write_text("mine")
        opened("trackio").close()
        assert (tmp_path / "trackio.id").read_text() == "new"
        assert runs.pop("trackio", ["other"]) == ["other"]  # then the project is on another machine


def test_files_of_tensorboard_that_cannot_be_deleted_are_not_mixed_with_new_ones(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "events.out.tfevents.1").touch()
    (tmp_path / "tensorboard").symlink_to(elsewhere)  # which shutil.rmtree refuses to delete
    with pytest.raises(UserError, match=r"tensorboard/events.out.tfevents.1 cannot be deleted"):
        RunLog(tmp_path, True, TrainState(), 9, TASK, TRACKERS.sinks(TrainConfig(report_to="tensorboard")))
