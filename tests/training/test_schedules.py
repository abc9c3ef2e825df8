"""--lr_schedule: those of torch, or their closed form, with any warm-up and cool-down."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training_runs import ROOT, words
from torch.optim import lr_scheduler

import train
from utils.config.cli import parse_args
from utils.data.order import Plan
from utils.settings.train import TrainConfig
from utils.training.schedule import SCHEDULES, learning_rate, not_reached, total_updates


def rates(schedule, arguments="{}", *flags, updates=100):
    """The learning rates of a run whose --lr is 0.2."""
    given = ["--lr", "0.2", "--lr_schedule", schedule, "--lr_schedule_args", arguments, *flags]
    config = parse_args(TrainConfig, "train.py", given, train.REGISTRIES)
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
    plan = Plan(1000, 10, 1, 0)
    assert total_updates(config, plan) == config.epochs * 100
    with pytest.raises(ValueError, match="would be -3 times --lr"):
        total_updates(replace(config, lr_schedule_args={"end": -3}, warmup_steps=200), plan)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--cooldown_steps 5", "--cooldown_steps has no effect"),
        ("--cooldown_steps 60 --warmup_steps 0.5", "--warmup_steps 50 and --cooldown_steps 60"),
    ],
)
def test_a_cool_down_that_cannot_be_is_refused(flags, error):
    given = words(f"--lr_schedule cosine --max_steps 100 {flags}")
    config = parse_args(TrainConfig, "train.py", given, train.REGISTRIES)
    with pytest.raises(ValueError, match=error):
        total_updates(config, Plan(1000, 10, 1, 0))


def count(steps, updates):
    """As Python rounds, also a half."""
    return round(steps * updates) if 0 < steps < 1 else int(steps)


def factors(config: TrainConfig, at: np.ndarray, whole: int) -> np.ndarray:
    """--lr_schedule over `whole` updates, at these updates, for --lr 1; each written anew."""
    at = at.astype(float)
    warmup = count(config.warmup_steps or 0, whole)
    given = config.lr_schedule_args
    rising = np.minimum(1, (at + 1) / max(1, warmup))
    done = np.maximum(0, at - warmup) / max(1, whole - warmup)
    end = given.get("end", 0.0)
    gamma = given.get("gamma", 0.1)
    if config.lr_schedule == "step":
        return rising * gamma ** (at // max(1, count(given.get("step_size", 0.3), whole)))
    if config.lr_schedule == "multistep":
        ends = [count(each, whole) for each in given.get("milestones", (0.5, 0.75))]
        return rising * gamma ** sum(at >= each for each in ends)
    if config.lr_schedule == "onecycle":
        top = 0.3 * whole - 1 if config.warmup_steps is None else warmup
        up = 0.04 + 0.96 * (1 - np.cos(np.pi * at / max(top, 1e-9))) / 2
        share = np.minimum(1, (at - top) / max(1, whole - 1 - top))
        down = 4e-6 + (1 - 4e-6) * (1 + np.cos(np.pi * share)) / 2
        return np.where((at <= top) & (top > 0), up, down)
    falling = {
        "constant": np.ones_like(at),
        "linear": end + (1 - end) * (1 - done),
        "cosine": end + (1 - end) * (1 + np.cos(np.pi * done)) / 2,
    }
    return np.where(at < warmup, rising, falling[config.lr_schedule])


def formula(config: TrainConfig, updates: int) -> np.ndarray:
    """The learning rates of a run."""
    cooldown = count(config.cooldown_steps, updates)
    whole = updates - cooldown
    falls = np.minimum(1, (updates - np.arange(updates)) / max(1, cooldown))
    return config.lr * factors(config, np.minimum(np.arange(updates), whole), whole) * falls


def random_schedule(rng: random.Random) -> tuple[TrainConfig, int]:
    """Settings of a schedule that may not fit into the updates of the run."""
    schedule = rng.choice([*SCHEDULES])
    updates = rng.choice([1, 2, 8, 40, 100])
    steps = lambda: rng.choice([0.1, 0.3, 0.5, 1, 7, 8, 9, 50, 100])  # noqa: E731
    own = {
        "linear": {"end": 0.25},
        "cosine": {"end": 0.1},
        "step": {"step_size": steps(), "gamma": 0.5},
        "multistep": {"milestones": [steps() for _ in range(rng.randint(1, 3))], "gamma": 0.5},
    }
    arguments = own.get(schedule, {}) if rng.random() < 0.8 else {}
    config = TrainConfig(
        lr=0.2,
        max_steps=updates,
        lr_schedule=schedule,
        lr_schedule_args=arguments,
        warmup_steps=rng.choice([None, 0, steps()]),
        cooldown_steps=rng.choice([0, 0, 0.2, 4]),
    )
    return config, updates


def names_not_reached(config: TrainConfig, updates: int) -> list[str]:
    """The settings that wait for an update which the run does not have, or have no effect."""
    last = min(updates - 1, updates - count(config.cooldown_steps, updates))
    usual = formula(config, updates)

    def matters(**arguments) -> bool:
        other = replace(config, lr_schedule_args={**config.lr_schedule_args, **arguments})
        return not np.allclose(formula(other, updates), usual, rtol=1e-6, atol=0)

    names = []
    if (config.warmup_steps or 0) >= 1 and config.warmup_steps > last:
        names.append("warmup_steps")
    if config.lr_schedule_args.get("step_size", 0) >= 1 and not matters(step_size=10**6):
        names.append("step_size")
    milestones = config.lr_schedule_args.get("milestones", [])
    without = [[*milestones[:n], *milestones[n + 1 :]] for n in range(len(milestones))]
    for each, others in zip(milestones, without, strict=True):
        if each >= 1 and "milestones" not in names and not matters(milestones=others):
            names.append("milestones")
    return names


@pytest.mark.full
def test_random_schedules_follow_their_formula_and_name_what_the_run_does_not_reach():
    rng = random.Random(9)
    outcomes = Counter()
    for _ in range(1000):
        config, updates = random_schedule(rng)
        cooldown = count(config.cooldown_steps, updates)
        whole = updates - cooldown
        error = ""
        if cooldown and count(config.warmup_steps or 0, updates) > whole:
            error = r"--warmup_steps \d+ and --cooldown_steps \d+ exceed the"
        elif cooldown and factors(config, np.array([whole]), whole) <= 1e-5:
            error = "--cooldown_steps has no effect"
        outcomes[error] += 1
        if error:
            with pytest.raises(ValueError, match=error):
                total_updates(config, Plan(8000, 8, 1, 0))
            continue
        assert total_updates(config, Plan(8000, 8, 1, 0)) == updates
        found = [learning_rate(config, update, updates) for update in range(updates)]
        assert found == pytest.approx(formula(config, updates), rel=1e-9, abs=1e-12), config
        lines = not_reached(config, updates)
        expected = names_not_reached(config, updates)
        assert [line.split()[0] for line in lines] == expected, (config, updates)
        outcomes.update(expected)
    assert len(outcomes) == 6 and min(outcomes.values()) > 15, outcomes


@pytest.mark.full
@pytest.mark.parametrize("length", ["--max_steps 2", "--dry_run --max_steps 2"])
def test_a_quick_look_at_a_recipe_names_the_warm_up_that_it_does_not_reach(length):
    recipe = f"--config {ROOT}/recipes/vit_finetune.yaml --pretrained false --model mlp"
    flags = f"{recipe} --global_batch_size 8 --mixed_precision no --report false {length}"
    (outcome,) = run_ranks(1, train.main, words(f"{flags} --max_train_samples 64 --threads 1"))
    assert outcome.code == 0, outcome.err
    line = "warmup_steps 50 is not reached in this run; use less than 2"
    assert outcome.out.splitlines().count(line) == 1
