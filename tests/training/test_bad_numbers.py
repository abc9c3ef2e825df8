"""NaN and infinity are named by update, rank and samples, and replace no good checkpoint."""

import re
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder
from helpers.ranks import run_ranks
from helpers.training_runs import MLP, records, refused, same_tensors, train_run, weights, words
from safetensors.torch import save_file

import eval
import predict
import train
from utils.config.cli import parse_args
from utils.data.order import permutation
from utils.data.selection import load_data
from utils.models.values import sum_bits
from utils.ranks.ranks import Ranks
from utils.runs.manifest import newest_good, write_manifest
from utils.runs.metadata import read_checkpoint
from utils.settings.train import TrainConfig

FLAGS = words("--model mlp --global_batch_size 12 --threads 1 --lr 0.01 --run_name run")
FLAGS += words("--max_train_samples 48 --save_every 2 --max_steps 9 --eval_every 99")


def _train_with_a_bad_sample(flags, step, rank):
    """Make the images of one rank's last microbatch NaN, at update `step` counted from 1."""
    update = train.train_update

    def poisoned(run, batches):
        if run.state.step == step - 1 and run.ranks.topology.rank == rank:
            last = (rank + 1) * run.plan.microbatches // run.ranks.topology.world_size - 1
            factors = {last: torch.nan}
            batches = (b._replace(images=b.images * factors.get(b.number, 1)) for b in batches)
        update(run, batches)

    train.train_update = poisoned
    train.main(flags)


@pytest.mark.full
@pytest.mark.parametrize(("processes", "accum", "rank"), [(1, 1, 0), (2, 2, 0), (2, 1, 1)])
def test_a_nan_or_infinite_loss_names_update_rank_and_samples_and_saves_nothing(
    processes, accum, rank
):
    flags = [*FLAGS, "--grad_accum", str(accum)]
    # a checkpoint is due after update 6
    outcomes = run_ranks(processes, _train_with_a_bad_sample, flags, 6, rank)
    assert [outcome.code for outcome in outcomes] == [2] * processes
    assert f"loss is NaN or infinite at update 6 on rank {rank}, samples" in outcomes[0].err
    assert outcomes[0].err.count("\n") == 1 and all(outcome.err == "" for outcome in outcomes[1:])
    # the order by hand: update 6 is the second of the second epoch, cut into equal microbatches
    microbatch = np.split(permutation(48, 0, 1)[12:24], processes * accum)[(rank + 1) * accum - 1]
    # --max_train_samples took a random subset: rows are positions in the whole split
    rows = load_data(parse_args(TrainConfig, "train.py", FLAGS)).train.image_index[microbatch]
    assert sorted(records("run", "bad_loss")[0]["samples"]) == sorted(rows.tolist())
    assert newest_good(Path("runs/run")).name == "step-00000004"
    assert all(tensor.isfinite().all() for tensor in weights("run").values())


@pytest.mark.parametrize(("processes", "step", "stops"), [(2, 6, False), (1, 5, True)])
def test_weights_that_an_update_ruins_are_not_saved_though_its_loss_was_fine(
    processes, step, stops
):
    # one is due after update 6
    outcomes = run_ranks(processes, _train_and_change_weights, FLAGS, step, _ruin, stops)
    assert [outcome.code for outcome in outcomes] == [2] * processes
    line = (
        r"weights are NaN or infinite after update [56] on samples (\d+, ){8}\.\.\. \(12 in all\)"
    )
    assert re.search(line, outcomes[0].err) and outcomes[0].err.count("\n") == 1
    assert newest_good(Path("runs/run")).name == "step-00000004"


def _ruin(parameters):
    parameters[0].data.view(-1)[0] = torch.inf


def _train_and_change_weights(flags, step, change, stops=False):
    update = train.train_update

    def changing(run, batches):
        update(run, batches)
        if run.state.step == step:
            change(list(run.module.parameters()))
            if stops:
                run.stopping._signal = signal.SIGTERM

    train.train_update = changing
    train.main(flags)


@pytest.mark.full
def test_after_bad_numbers_the_run_goes_on_from_the_last_good_checkpoint():
    run_ranks(1, _train_with_a_bad_sample, FLAGS, 6, 0)
    train_run(1, "run", *FLAGS, "--resume", "auto")
    train_run(1, "whole", *FLAGS, "--run_name", "whole")
    assert [record["step"] for record in records("run", "start")] == [0, 4]
    assert not records("run", "bad_loss")
    assert same_tensors(weights("run"), weights("whole"))


@pytest.mark.full
def test_evaluations_with_nan_weights_or_infinite_outputs_end_with_one_line():
    train_run(1, "run", *MLP, "--max_steps", "2")
    checkpoint, tensors = Path("runs/run/checkpoints/step-00000002"), weights("run")
    (image,) = image_folder("images", {"a": 1})
    for problem in (
        "outputs of the model are NaN or infinite",
        "weights are NaN or infinite (output.bias)",
    ):
        for tensor in tensors.values():
            tensor.mul_(1e38 if "outputs" in problem else 1e-38)
        if "bias" in problem:
            tensors["output.bias"][0] = torch.nan
        save_file(tensors, checkpoint / "model.safetensors")
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)
        for main, more in ((eval.main, []), (predict.main, [str(image)])):
            line = refused(main, "--ckpt", "runs/run", *more, processes=2)
            assert f"runs/run/checkpoints/step-00000002: {problem}" in line
    line = refused(train.main, *MLP, "--init_from", "runs/run", processes=2)
    assert "step-00000002: output.bias is NaN or infinite; use other weights" in line


def test_a_nan_evaluation_at_the_end_of_a_run_is_reported():
    (outcome,) = run_ranks(1, _train_and_change_weights, [*FLAGS, "--max_steps", "2"], 2, _enlarge)
    assert outcome.code == 0
    line = r"^update 2: the evaluation loss is (nan|inf); lower --lr"
    assert re.search(line, outcome.out, re.M)


def _enlarge(parameters):
    for parameter in parameters:
        parameter.data.mul_(1e38)


# Ranks that train different weights.


def _train_and_change_rank_1(flags, what, kinds):
    """After update 6, a bit of rank 1 differs; with `kinds`, so do the kinds of processor."""
    update = train.train_update

    def changing(run, batches):
        update(run, batches)
        if run.state.step == 6 and run.ranks.topology.rank == 1:
            parameter = dict(run.module.named_parameters())["output.weight"]
            momentum = run.optimizer.state[parameter]["momentum_buffer"]
            tensor = parameter.data if what == "weight" else momentum
            tensor.view(torch.int32)[3, 5] ^= 1

    train.train_update = changing
    if kinds:
        Ranks.rounding = property(lambda ranks: f"processor {ranks.topology.rank}")
    train.main(flags)


@pytest.mark.full
@pytest.mark.parametrize("what", ["weight", "momentum"])
def test_ranks_that_train_different_weights_end_at_the_next_save_which_saves_nothing(what):
    line = refused(partial(_train_and_change_rank_1, what=what, kinds=False), *FLAGS, processes=2)
    name = {"weight": "output.weight", "momentum": "output.weight, momentum_buffer"}[what]
    assert f"after update 6, {name} of rank 1 differs from that of rank 0; " in line
    assert newest_good(Path("runs/run")).name == "step-00000004"


@pytest.mark.full
def test_ranks_with_different_processors_may_round_differently_which_is_said_once():
    main, other = run_ranks(2, _train_and_change_rank_1, FLAGS, "weight", True)
    assert (main.code, other.code) == (0, 0), main.err
    said = "processors may round differently: processor 0; processor 1;"
    assert main.out.count(said) == 1 and other.out == ""
    newest = newest_good(Path("runs/run"))
    # nor by a resume
    assert newest.name == "step-00000009" and read_checkpoint(newest).state.rounding_said


def test_a_sum_of_bits_changes_with_each_bit_and_each_exchange():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool):
        tensor = torch.randn(5, 3, 37, 33).round().to(dtype)
        other = tensor.clone(memory_format=torch.channels_last)
        cases = tensor, tensor.clone(), tensor.flip(0), other, other.clone()
        found = [sum_bits({"a": values})["a"] for values in cases]
        assert found[0] == found[1] != found[2] and found[3] == found[4]
        changed = tensor.clone().flatten()
        changed.view(torch.uint8)[-1] ^= 1
        assert sum_bits({"a": changed.view_as(tensor)})["a"] != found[0]
    signs = torch.randn(2 * 4093)
    two, none = signs.clone(), signs.abs()
    two[[1, 3]] *= -1
    assert len({sum_bits({"a": values})["a"] for values in (signs, two, none)}) == 3
