"""grad_norm in the log is that of all processes, before --clip_norm."""

import os

import pytest
from helpers.training_runs import MLP, records, returned, train_run
from safetensors.torch import load_file

import train

PLAIN = [*MLP, "--log_every", "1", "--save_every", "1", "--keep", "all", "--max_steps", "2"]
PLAIN += ["--momentum", "0", "--weight_decay", "0", "--lr_schedule", "constant"]


def sharded(flags: list[str]) -> None:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    train.main(flags)


@pytest.mark.full
@pytest.mark.parametrize(
    ("main", "more"),
    [
        (train.main, ["--microbatches", "4"]),
        pytest.param(train.main, [], marks=pytest.mark.full),
        pytest.param(sharded, [], marks=pytest.mark.full),
    ],
)
def test_the_norm_of_the_gradient_is_that_of_the_step_of_sgd(main, more):
    returned(2, main, [*PLAIN, *more, "--run_name", "run", "--clip_norm", "1e9"])
    before, after = (
        load_file(f"runs/run/checkpoints/step-{step:08}/model.safetensors") for step in (1, 2)
    )
    squares = [(after[name] - before[name]).double().square().sum() for name in after]
    first, second = (record["grad_norm"] for record in records("run", "train"))
    assert second == pytest.approx(sum(squares).sqrt().item() / 0.01, rel=1e-3)
    clipped = [r["grad_norm"] for r in train_run(1, "one", *PLAIN, "--clip_norm", "0.1")[1:2]]
    assert clipped == [pytest.approx(first, rel=1e-5)] and first > 0.1
