"""--dry_run computes one update, says how much memory it needs, and leaves nothing behind."""

import shlex
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training_runs import refused, train_run, words

import train

FLAGS = words("--model mlp --threads 1 --run_name run --max_steps 3")


def test_a_dry_run_says_what_a_batch_needs_and_leaves_no_run():
    main, other = run_ranks(
        2, sizes_of_dry_run, [*FLAGS, *words("--max_eval_samples 150 --eval_batch_size 10")]
    )
    assert (main.code, other.code) == (0, 0), main.err
    assert main.value == other.value == [10]
    assert "an evaluation batch of 10 images" in main.out and "Lockstep  dry run\n" in main.out
    assert other.out == ""
    assert not list(Path("runs").iterdir())


def sizes_of_dry_run(flags: list[str]) -> list[int]:
    """The sizes of the batches that this rank evaluates in a dry run."""
    sizes = []
    watch_model(lambda module, given, _: None if module.training else sizes.append(len(given[0])))
    train.main([*flags, "--dry_run"])
    return sizes


def watch_model(hook) -> None:
    """From now on, models are built with this forward hook."""
    build = train.build_model

    def built(*arguments):
        module = build(*arguments)
        module.register_forward_hook(hook)
        return module

    train.build_model = built


@pytest.mark.full
def test_a_dry_run_of_a_resume_starts_from_its_checkpoint_and_does_not_change_it():
    def files():
        return {
            path: path.is_file() and path.stat().st_mtime_ns for path in Path("runs").rglob("*")
        }

    train_run(1, "run", *FLAGS[:-4], "--max_steps", "2")
    before = files()
    (outcome,) = run_ranks(1, train.main, [*FLAGS, "--resume", "auto", "--dry_run"])
    assert outcome.code == 0 and "resuming from runs/run/checkpoints/step-00000002" in outcome.out
    assert files() == before


@pytest.mark.full
def test_a_complete_run_can_be_tried_too():
    train_run(2, "run", *FLAGS)
    outcomes = run_ranks(2, train.main, [*FLAGS, "--resume", "auto", "--dry_run"])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert (
        "dry run: an update of 128 images took" in outcomes[0].out
        and "3 in all, from 3" in outcomes[0].out
    )
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


@pytest.mark.parametrize(
    "training,fix", [(True, "raise --grad_accum"), (False, "lower --eval_batch_size")]
)
@pytest.mark.parametrize(
    "flags", [["--dry_run"], pytest.param(["--eval_every", "1"], marks=pytest.mark.full)]
)
def test_a_batch_that_does_not_fit_is_one_line_with_the_setting_that_helps(training, fix, flags):
    line = refused(_out_of_memory, str(training), *FLAGS, *flags)
    assert "out of memory" in line and fix in line
    assert not list(Path("runs").glob("*/checkpoints/step-*"))


def _out_of_memory(flags: list[str]) -> None:
    """Train with a layer that needs more memory than there is, in training or in evaluation."""
    when = flags[0] == "True"
    watch_model(lambda module, *_: torch.empty(2**45) if module.training is when else None)
    train.main(flags[1:])


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--data ./missing", "--data ./missing: no such file, folder or data set"),
        ("--lr_schedule cosin", "--lr_schedule cosin: no such lr schedule"),
        ("--optimizer_args '{nesterv: true}'", "unexpected keyword argument 'nesterv'"),
    ],
)
def test_a_dry_run_with_resume_auto_and_no_run_yet_checks_its_settings_first(flags, problem):
    more = shlex.split(flags) + words("--run_name new --resume auto --dry_run")
    assert problem in refused(train.main, *FLAGS[:4], *more)
