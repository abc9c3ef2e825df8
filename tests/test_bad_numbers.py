"""Numbers that go bad are named by update, rank and samples, and no checkpoint of them replaces a good one."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import MLP, records, refused, train_run, weights
from safetensors.torch import save_file

import eval
import predict
import train
from utils.data.order import permutation
from utils.runs.manifest import newest_good, write_manifest

FLAGS = ["--model", "mlp", "--global_batch_size", "12", "--threads", "1", "--lr", "0.01", "--run_name", "run"]
FLAGS += ["--max_train_samples", "48", "--save_every", "2", "--max_steps", "9", "--eval_every", "99"]


def _train_with_a_bad_sample(flags, step, rank):
    """Make the images of one rank's last microbatch NaN, at update `step` counted from 1."""
    update = train.train_update

    def poisoned(run, batches):
        if run.state.step == step - 1 and run.ranks.topology.rank == rank:
            last = (rank + 1) * run.plan.microbatches // run.ranks.topology.world_size - 1
            batches = (b._replace(images=b.images * torch.nan) if b.number == last else b for b in batches)
        update(run, batches)

    train.train_update = poisoned
    train.main(flags)


@pytest.mark.parametrize(("processes", "accum", "rank"), [(1, 1, 0), (2, 2, 0), (3, 1, 0), (2, 1, 1)])
def test_a_nan_or_infinite_loss_names_update_rank_and_samples_and_saves_nothing(processes, accum, rank):
    flags = [*FLAGS, "--grad_accum", str(accum)]
    outcomes = run_ranks(processes, _train_with_a_bad_sample, flags, 6, rank)  # a checkpoint is due after update 6
    assert [outcome.code for outcome in outcomes] == [2] * processes
    assert f"loss is NaN or infinite at update 6 on rank {rank}, samples" in outcomes[0].err
    assert outcomes[0].err.count("\n") == 1 and all(outcome.err == "" for outcome in outcomes[1:])
    # the order by hand: update 6 is the second of the second epoch, cut into equal microbatches
    microbatch = np.split(permutation(48, 0, 1)[12:24], processes * accum)[(rank + 1) * accum - 1]
    # --max_train_samples took a random subset: rows are positions in the whole split
    assert sorted(records("run", "bad_loss")[0]["samples"]) == sorted(returned(1, _rows, FLAGS, microbatch)[0])
    assert newest_good(Path("runs/run/checkpoints"))[0].name == "step-00000004"
    assert all(tensor.isfinite().all() for tensor in weights("run").values())


def _rows(flags, positions):
    from utils.config.cli import parse_args
    from utils.config.settings import TrainConfig
    from utils.data.selection import load_data

    return load_data(parse_args(TrainConfig, "train.py", flags)).train.rows[positions].tolist()


@pytest.mark.parametrize(("processes", "why_saved"), [(1, "due"), (2, "due"), (1, "told to stop")])
def test_weights_that_an_update_ruins_are_not_saved_though_its_loss_was_fine(processes, why_saved):
    outcomes = run_ranks(processes, _train_and_ruin_weights, FLAGS, 6 if why_saved == "due" else 5, why_saved)
    assert [outcome.code for outcome in outcomes] == [2] * processes
    assert re.search(
        r"weights are NaN or infinite after update [56], of 12 samples (\d+, ){7}\d+\.\.\.", outcomes[0].err
    )
    assert outcomes[0].err.count("\n") == 1
    assert newest_good(Path("runs/run/checkpoints"))[0].name == "step-00000004"


def _train_and_ruin_weights(flags, step, why_saved):
    update = train.train_update

    def ruining(run, batches):
        update(run, batches)
        if run.state.step == step:
            with torch.no_grad():
                next(run.module.parameters()).view(-1)[0] = torch.inf
            if why_saved == "told to stop":
                run.stopping._signal = signal.SIGTERM

    train.train_update = ruining
    train.main(flags)


def test_after_bad_numbers_the_run_goes_on_from_the_last_good_checkpoint():
    run_ranks(1, _train_with_a_bad_sample, FLAGS, 6, 0)
    train_run(1, "run", *FLAGS, "--resume", "auto")
    train_run(1, "whole", *FLAGS, "--run_name", "whole")
    assert [record["step"] for record in records("run", "start")] == [0, 4] and records("run", "bad_loss") == []
    assert all(torch.equal(weights("run")[name], tensor) for name, tensor in weights("whole").items())


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluations_and_predictions_of_nan_weights_or_infinite_outputs_end_with_one_line(processes):
    train_run(1, "run", *MLP, "--max_steps", "2")
    checkpoint, tensors = Path("runs/run/checkpoints/step-00000002"), weights("run")
    (image,) = image_folder("images", {"a": 1})
    for change, problem in (
        (lambda tensor: tensor.mul_(1e38), "outputs of the model are NaN or infinite"),
        (lambda tensor: tensor.view(-1)[:1].fill_(torch.nan), "weights are NaN or infinite (output.bias)"),
    ):
        for name in ("output.bias",) if "bias" in problem else tensors:
            change(tensors[name])
        save_file(tensors, checkpoint / "model.safetensors")
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)
        for script in (eval, predict):
            more = [str(image)] if script is predict else []
            line = refused(script.main, "--ckpt", "runs/run", *more, processes=processes)
            assert f"runs/run/checkpoints/step-00000002: {problem}" in line and "another checkpoint" in line
        if "bias" in problem:
            line = refused(train.main, *MLP, "--init_from", "runs/run", processes=processes)
            assert "step-00000002: output.bias is NaN or infinite; use other weights" in line


def test_a_nan_evaluation_at_the_end_of_a_run_is_reported():
    (outcome,) = run_ranks(1, _train_and_enlarge_weights, [*FLAGS, "--max_steps", "2"], 2)
    assert outcome.code == 0
    assert re.search(r"^update 2: the loss of the evaluation is (nan|inf); lower --lr", outcome.out, re.M)


def _train_and_enlarge_weights(flags, step):
    update = train.train_update

    def enlarging(run, batches):
        update(run, batches)
        if run.state.step == step:
            for parameter in run.module.parameters():
                parameter.data.mul_(1e38)

    train.train_update = enlarging
    train.main(flags)
