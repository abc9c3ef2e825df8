"""Random networks whose gradients are ready in another order, in several buckets of DDP.

Each run is killed once or twice at random and resumed. It must end with the bits of an
uninterrupted run:

    python -m pytest -m "full or slow" tests/promises/test_random_networks.py
"""

import json
import os
import random
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.training_runs import records, same_tensors, weights, words
from helpers.waiting import SOON
from torch import nn

import train
from utils.models.zoo import OWN_MODELS
from utils.runs.manifest import OPTIMIZER

UPDATES, SAVE_EVERY = 14, 3  # at most
FLAGS = words(f"--max_steps {UPDATES} --data digits --model branching --global_batch_size 24")
FLAGS += words("--max_train_samples 100 --max_eval_samples 20 --eval_every 5 --log_every 1")
FLAGS += words("--threads 1 --keep 3 --report false")


class Branching(nn.Module):
    """A random graph of linear layers, registered in a random order, of which two are one."""

    def __init__(self, spec, classes, seed=0, norm=False, unused=False):
        super().__init__()
        chance, width = random.Random(seed), 96
        count = chance.randrange(6, 12)
        self.sources = [
            chance.sample(range(node), min(node, chance.randint(1, 3))) for node in range(1, count)
        ]
        self.shared = chance.randrange(1, count)  # its layer is also that of the last node
        names = [f"node{node}" for node in range(count)] + ["head", "aside"][: 1 + unused]
        chance.shuffle(names)
        self.layers = nn.ModuleDict()
        for name in names:
            inputs = spec.channels * spec.height * spec.width if name == "node0" else width
            layer = nn.Linear(inputs, classes if name == "head" else width)
            self.layers[name] = nn.Sequential(layer)
            if name != "head":
                self.layers[name].extend([nn.BatchNorm1d(width)] * norm)
                self.layers[name].extend([nn.ReLU(), nn.Dropout(chance.choice((0.0, 0.2)))])

    def forward(self, images):
        nodes = [self.layers["node0"](images.flatten(1))]
        for node, sources in enumerate(self.sources, start=1):
            mean = sum(nodes[source] for source in sources) / len(sources)
            nodes.append(self.layers[f"node{node}"](mean))
        last = self.layers[f"node{self.shared}"](nodes[-1])
        return self.layers["head"](last + sum(nodes) / len(nodes))


def train_branching(flags, megabytes, kill_at=None, victims=(), forward=False):
    """Train with buckets of that size. Returns the number of DDP's buckets, 0 without DDP.

    `kill_at`: the update, counted from 0, in which the `victims` among the ranks kill themselves,
    before it or in its `forward` pass.
    """
    OWN_MODELS["branching"] = Branching
    make, update, end, counts = train.make_accelerator, train.train_update, train.log_end, []

    def with_small_buckets(*given, **named):
        accelerator = make(*given, **named)
        accelerator.ddp_handler.bucket_cap_mb = megabytes
        return accelerator

    def killed(run, batches):
        if run.state.step == kill_at and run.ranks.topology.rank in victims:
            if not forward:
                os.kill(os.getpid(), signal.SIGKILL)
            run.module.layers["head"].register_forward_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        update(run, batches)

    def count_buckets(run, *given):
        log = getattr(run.model, "_get_ddp_logging_data", dict)()
        sizes = log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or ""
        counts.append(len(words(sizes)))
        return end(run, *given)

    train.make_accelerator = with_small_buckets
    train.train_update, train.log_end = killed, count_buckets
    train.main(flags)
    return counts[0]


def ends_equal(name, other):
    """Whether two runs ended with the same weights, averages, optimizer states and losses, bit for
    bit.
    """
    losses, others = ([line["loss"] for line in records(run, "train")] for run in (name, other))
    folder = Path(f"runs/{name}/checkpoints/step-{UPDATES:08d}")
    files = ["model.safetensors", OPTIMIZER, *(path.name for path in folder.glob("ema.*"))]
    same = (same_tensors(weights(name, file=f), weights(other, file=f)) for f in files)
    return len(losses) == UPDATES and losses == others and all(same)


def drawn(chance, microbatches):
    """The flags of a random configuration, and the size of its buckets in MB."""
    norm, unused = chance.random() < 0.3, chance.random() < 0.2
    arguments = {"seed": chance.randrange(10**6), "norm": norm, "unused": unused}
    flags = [*FLAGS, "--model_args", json.dumps(arguments)]
    flags += words(f"--save_every {chance.randint(1, SAVE_EVERY)}")
    flags += words(f"--drop_last {norm}")  # batch statistics need more than one sample
    flags += ["--find_unused_parameters"] * unused
    flags += words(chance.choice(["--optimizer sgd --lr 0.1", "--optimizer adamw --lr 0.003"]))
    flags += words("--ema_decay 0.8") * (chance.random() < 0.5)
    flags += words("--clip_norm 0.5") * (chance.random() < 0.5)
    name, values = ("microbatches", "48") if microbatches else ("grad_accum", "12")
    flags += words(f"--{name} {chance.choice(values)}")
    return flags, chance.choice([0.02, 0.05])


IN_TEST_ALL = (3, 0, False)  # the others are slow


@pytest.mark.parametrize(
    "processes, number, microbatches",
    [
        pytest.param(*case, marks=pytest.mark.full if case == IN_TEST_ALL else pytest.mark.slow)
        for case in product((2, 3, 4), range(6), (False, True))
    ],
)
def test_a_killed_run_of_a_branching_network_ends_with_the_bits_of_a_whole_one(
    processes, number, microbatches
):
    chance = random.Random(f"{processes} {number} {microbatches}")
    flags, megabytes = drawn(chance, microbatches)
    whole = run_ranks(processes, train_branching, ["--run_name", "whole", *flags], megabytes)
    assert [outcome.code for outcome in whole] == [0] * processes, whole[0].err
    assert microbatches or whole[0].value > 2, "too few buckets to show anything"
    again = ["--run_name", "run", *flags, "--resume", "auto"]
    after_a_save = range(2 * SAVE_EVERY, UPDATES)  # the second save waits for the first
    places = sorted(chance.sample(after_a_save, chance.randint(1, 2)))
    stop = ["--stop_after", str(chance.randint(1, places[0]))]
    stopped = run_ranks(processes, train_branching, [*again, *stop], megabytes)
    assert [outcome.code for outcome in stopped] == [0] * processes, stopped[0].err
    for step in places:
        rank, begun = chance.randrange(-1, processes), time.monotonic()
        victims = range(processes) if rank < 0 else [rank]
        kill = step, victims, chance.random() < 0.5
        ended = run_ranks(processes, train_branching, again, megabytes, *kill)
        codes = [outcome.code for outcome in ended]
        expected = [-signal.SIGKILL if place in victims else 2 for place in range(processes)]
        assert codes == expected and time.monotonic() - begun < 2 * SOON, ended
    resumed = run_ranks(processes, train_branching, again, megabytes)
    assert [outcome.code for outcome in resumed] == [0] * processes, resumed[0].err
    assert records("run", "start")[-1]["step"] > 0 and ends_equal("run", "whole")
    if microbatches:
        alone = run_ranks(1, train_branching, ["--run_name", "alone", *flags], megabytes)
        assert alone[0].code == 0 and ends_equal("run", "alone"), alone[0].err
