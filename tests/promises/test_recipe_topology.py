"""A whole modern recipe has the same losses on one to three processes and after a kill."""

import re
from pathlib import Path

import pytest
from helpers.make_data import image_folder
from helpers.ranks import run_ranks, start_ranks
from helpers.training_runs import (
    records,
    same_tensors,
    slow_train,
    train_run,
    weights,
    words,
    working_in,
)
from helpers.waiting import until

import train

# Each alone changes the first update. The network has neither dropout nor batch statistics.
ALL_ON = {
    name: [f"--{name}", value]
    for name, value in {
        "mixup": "0.4", "cutmix": "1", "repeats": "2", "sampler": "balanced",
        "class_weights": "balanced", "label_smoothing": "0.1", "min_scale": "0.4",
        "crop_padding": "2", "flip": "alternate", "auto_augment": "trivialaugment",
        "color_jitter": "0.4", "random_erasing": "0.5", "cutout": "3", "loss": "focal",
    }.items()
}  # fmt: skip
# Six updates an epoch, the last one of nine samples
RUN = words("--data digits --max_train_samples 129 --max_eval_samples 30 --global_batch_size 24")
RUN += ["--model_args", "{hidden: 16}", *words("--model mlp --lr 0.05 --threads 1 --max_steps 20")]
RUN += words("--log_every 1 --save_every 7 --eval_every 20 --lr_schedule constant")
EVERYTHING = [*RUN, *(word for flags in ALL_ON.values() for word in flags)]


def losses(name):
    return [record["loss"] for record in records(name, "train")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of one process, `1`, and one of two, `2`."""
    folder = tmp_path_factory.mktemp("recipe")
    with working_in(folder):
        for processes in (1, 2):
            train_run(processes, str(processes), *EVERYTHING)
    return folder


@pytest.mark.parametrize(
    ("processes", "accum"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.full),
        pytest.param(1, 4, marks=pytest.mark.full),
    ],
)
def test_every_topology_has_the_losses_of_one_process_with_everything_on(
    processes, accum, folder, monkeypatch
):
    monkeypatch.chdir(folder)
    name = "2" if (processes, accum) == (2, 1) else f"{processes}x{accum}"
    if name != "2":
        train_run(processes, name, *EVERYTHING, "--grad_accum", str(accum))
    assert len(losses("1")) == 20 and losses(name) == pytest.approx(losses("1"), rel=1e-5)
    assert len({f"{loss:.4f}" for loss in losses("1")}) > 15
    plan = records(name, "start")[0]
    assert (plan["processes"], plan["grad_accum"]) == (processes, accum)


@pytest.mark.full
def test_a_killed_run_ends_with_the_same_weights_with_everything_on(folder, monkeypatch):
    monkeypatch.chdir(folder)
    started = start_ranks(2, slow_train, EVERYTHING, 0.0, 11)
    until(lambda: Path("held-0").exists() and Path("held-1").exists())
    until(lambda: Path("runs/run/checkpoints/step-00000007").exists())
    started.kill()
    started.finish()
    assert not Path("runs/run/checkpoints/step-00000014").exists()
    train_run(2, "run", *EVERYTHING, "--resume", "auto")
    assert records("run", "start")[-1]["step"] == 7
    assert losses("run") == losses("2") and same_tensors(weights("run"), weights("2"))


@pytest.mark.full
def test_each_flag_alone_changes_the_loss_of_the_first_update():
    found = {}
    for name, flags in {"none": [], **ALL_ON}.items():
        train_run(1, name, *RUN, *flags, "--max_steps", "1")
        (found[name],) = losses(name)
    assert len({f"{loss:.6f}" for loss in found.values()}) == len(found), found


@pytest.mark.full
def test_the_start_of_a_run_says_what_its_training_metrics_are_measured_against():
    image_folder("two", {"a": 20, "b": 20})
    for flags, text in (
        ("", r"recipe +mixup 0.2\nmixing +training accuracy is against the dominant label"),
        (
            "--data two --task binary",
            "mixing +training metrics count a label if its share is above",
        ),
    ):
        more = words(f"{flags} --mixup 0.2 --max_steps 1")
        (outcome,) = run_ranks(1, train.main, [*RUN, *more])
        assert re.search(text, outcome.out), outcome.out
