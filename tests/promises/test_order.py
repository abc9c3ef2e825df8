"""Which sample is next: the same global batches on every topology, each sample once an epoch."""

import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.ranks import returned
from helpers.training_runs import ROOT

import train
from utils.config.cli import parse_args
from utils.data.order import Plan, fold_in, permutation
from utils.data.samplers import UpdateSampler, evaluation_blocks
from utils.ranks.session import distributed_session
from utils.ranks.stopping import Stopping
from utils.settings.train import TrainConfig


def drawn_indices(*flags):
    """(update, number, indices) of each batch that this rank's prepared training loader gives, over
    the whole run.
    """
    config = parse_args(TrainConfig, "train.py", ["--model", "mlp", *flags])
    with distributed_session("train.py", config) as ranks:
        ranks.join()
        run = train.build(config, ranks, Stopping(SimpleNamespace(orphaned=False)), None)
        return [(batch.update, batch.number, batch.indices.tolist()) for batch in run.train_batches]


def updates_drawn(processes, accum, *flags):
    """The samples of each update, a list of its microbatches, which must be those that each rank is
    to compute.
    """
    by_rank = returned(processes, drawn_indices, "--grad_accum", str(accum), *flags)
    updates = len(by_rank[0]) // accum
    drawn = [[None] * processes * accum for _ in range(updates)]
    for rank, batches in enumerate(by_rank):
        places = [(n // accum, rank * accum + n % accum) for n in range(len(batches))]
        assert [(update, number) for update, number, _ in batches] == places
        for update, number, indices in batches:
            drawn[update][number] = indices
    return drawn


@pytest.mark.parametrize(
    "samples",
    [pytest.param(103, marks=pytest.mark.full), 97, pytest.param(96, marks=pytest.mark.full)],
)  # tails of 7, of 1 (ranks with nothing to do), and none
def test_every_topology_draws_the_same_updates_and_each_sample_once(samples):
    flags = ("--data", f"synthetic/3x8x{samples}", "--global_batch_size", "24", "--epochs", "2")
    alone = [sum(update, []) for update in updates_drawn(1, 1, *flags)]
    per_epoch = -(-samples // 24)
    assert len(alone) == 2 * per_epoch
    epochs = [alone[:per_epoch], alone[per_epoch:]]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == list(range(samples))
    assert epochs[0] != epochs[1]
    for processes, accum in ((2, 1), (3, 1), (1, 2), (2, 2), (3, 4)):
        updates = updates_drawn(processes, accum, *flags)
        # Microbatches are consecutive parts of an update, in the order of their numbers, whichever
        # rank computes them.
        expected = [np.array_split(update, processes * accum) for update in alone]
        assert updates == [[part.tolist() for part in update] for update in expected]


def test_drop_last_leaves_out_only_the_tail():
    flags = ("--data", "synthetic/3x8x103", "--global_batch_size", "24", "--epochs", "2")
    updates = [sum(update, []) for update in updates_drawn(1, 3, *flags, "--drop_last")]
    assert [len(update) for update in updates] == [24] * 8
    assert len(set(sum(updates[:4], []))) == len(set(sum(updates[4:], []))) == 96


def test_seeds_and_epochs_are_hashed_not_added():
    orders = [permutation(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert permutation(50, 1, 2).tolist() == permutation(50, 1, 2).tolist()


def test_the_order_is_pinned_so_that_no_upgrade_changes_a_run():
    assert fold_in(0, "order", 0) == 4188667365335418757
    assert permutation(10, 0, 0).tolist() == [4, 5, 8, 6, 3, 9, 7, 1, 2, 0]


@pytest.mark.parametrize("position", [0, 24, 72, 96])
def test_a_sampler_started_anywhere_continues_the_same_order(position):
    plan, updates = Plan(samples=103, global_batch_size=24, microbatches=4, seed=5), position // 24
    whole = [(*m[:3], m.indices.tolist()) for m in UpdateSampler(plan, 2, 10)]
    rest = [(*m[:3], m.indices.tolist()) for m in UpdateSampler(plan, 2, 10 - updates, updates)]
    assert rest == whole[4 * updates :]
    assert [place[:3] for place in whole[20:24]] == [(5, 1, 0), (5, 1, 2), (5, 1, 1), (5, 1, 3)]


def test_pieces_of_an_update_differ_by_at_most_one_sample():
    for samples in range(1, 60):
        plan = Plan(samples, 60, 7, seed=0)
        sizes = plan.microbatch_sizes(0)
        assert sum(sizes) == samples and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("samples", "sizes"), [(10, [10]), (153, [16] * 9 + [9]), (4097, [256] * 16 + [1])]
)
def test_few_samples_are_evaluated_in_up_to_16_blocks_and_many_in_batches(samples, sizes):
    blocks = [block.indices.tolist() for block in evaluation_blocks(samples, 256)]
    assert list(map(len, blocks)) == sizes and sum(blocks, []) == list(range(samples))


def test_the_picture_in_the_readme_is_drawn_from_this_order():
    code = runpy.run_path(str(ROOT / "docs/images/same_run.py"))
    assert (ROOT / "docs/images/same_run.svg").read_text() == code["draw"]()
    alone = code["samples"](1, 0, 2)
    assert sorted(code["samples"](2, 0, 2) + code["samples"](2, 1, 2)) == alone
