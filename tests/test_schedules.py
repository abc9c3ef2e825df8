"""Learning rate schedules are those of torch, or their closed form, with any warm-up and cool-down."""

from dataclasses import replace

import pytest
import torch
from helpers.training_runs import words
from torch.optim import lr_scheduler

import train
from utils.config.cli import parse_args
from utils.config.settings import TrainConfig
from utils.data.order import Plan
from utils.training.schedule import SCHEDULES, learning_rate, total_updates


def rates(schedule, arguments="{}", *flags, updates=100):
    """The learning rates of a run whose --lr is 0.2."""
    given = ["--lr", "0.2", "--lr_schedule", schedule, "--lr_schedule_args", arguments, *flags]
    config = parse_args(TrainConfig, "train.py", given, train.TABLES)
    return [learning_rate(config, update, updates) for update in range(updates)]


def torchs(make, updates=100):
    """The learning rates of one of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.2)
    scheduler, found = make(optimizer), []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


ONE = {"div_factor": 4, "final_div_factor": 10}
SPECIAL = "{milestones: [30, 0.6], gamma: 0.2}"


@pytest.mark.parametrize(
    ("schedule", "arguments", "make"),
    [
        ("step", "{step_size: 20, gamma: 0.5}", lambda o: lr_scheduler.StepLR(o, 20, 0.5)),
        ("multistep", SPECIAL, lambda o: lr_scheduler.MultiStepLR(o, [30, 60], 0.2)),
        ("linear", "{end: 0.25}", lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 100)),
        ("onecycle", "{}", lambda o: lr_scheduler.OneCycleLR(o, 0.2, 100)),
        (
            "onecycle",
            "{div_factor: 4, final_div_factor: 10}",
            lambda o: lr_scheduler.OneCycleLR(o, 0.2, 100, **ONE),
        ),
        ("cosine", "{end: 0.1}", lambda o: lr_scheduler.CosineAnnealingLR(o, 100, 0.02)),
    ],
)
def test_schedules_are_those_of_torch(schedule, arguments, make):
    assert rates(schedule, arguments) == pytest.approx(torchs(make), abs=1e-12)


@pytest.mark.parametrize("warmup", ["10", "0.1"])
def test_every_schedule_rises_linearly_over_the_warm_up(warmup):
    for schedule in SCHEDULES:
        found = rates(schedule, "{}", "--warmup_steps", warmup)
        rising = [0.02 * (update + 1) for update in range(10)]
        assert schedule == "onecycle" or found[:10] == pytest.approx(rising), schedule
        assert found[10] == pytest.approx(0.2), schedule
    # Steps are counted from the start of the run.
    assert rates("multistep", "{}", "--warmup_steps", warmup)[49:51] == pytest.approx([0.2, 0.02])


@pytest.mark.parametrize("cooldown", ["20", "0.2"])
def test_every_schedule_falls_linearly_to_0_over_the_cool_down(cooldown):
    for schedule in SCHEDULES:
        arguments = "{end: 0.5}" if schedule in ("linear", "cosine") else "{}"
        found = rates(schedule, arguments, "--warmup_steps", "10", "--cooldown_steps", cooldown)
        whole = rates(schedule, arguments, "--warmup_steps", "10", updates=80)
        assert found[:80] == pytest.approx(whole, abs=1e-12), schedule
        end = found[80]
        falling = [end * (20 - n) / 20 for n in range(20)]
        assert found[80:] == pytest.approx(falling, abs=1e-12), schedule
        assert arguments == "{}" or end == pytest.approx(0.1), schedule
        assert all(type(lr) is float for lr in found)  # others would make a checkpoint unreadable


def test_arguments_are_tried_over_a_run_of_any_length():
    config = TrainConfig(lr_schedule="linear", lr_schedule_args={"end": 0.1}, cooldown_steps=500)
    SCHEDULES.check(config)
    with pytest.raises(ValueError, match="would be -3 times --lr"):
        SCHEDULES.check(replace(config, lr_schedule_args={"end": -3}, warmup_steps=200))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--cooldown_steps 5", "--cooldown_steps has no effect"),
        ("--cooldown_steps 60 --warmup_steps 0.5", "--warmup_steps 50 and --cooldown_steps 60"),
    ],
)
def test_a_cool_down_that_cannot_be_is_refused(flags, error):
    given = words(f"--lr_schedule cosine --max_steps 100 {flags}")
    config = parse_args(TrainConfig, "train.py", given, train.TABLES)
    with pytest.raises(ValueError, match=error):
        total_updates(config, Plan(1000, 10, 1, 0))
