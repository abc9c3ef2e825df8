"""replay.py --verify computes a run again, on any number of processes, and finds each change;
--against finds where two runs part.
"""

import contextlib
import io
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, refused, rewrite_manifest, slow_train, train_run, words
from safetensors.torch import load_file, save_file

import replay
import train
from utils.data.order import permutation
from utils.data.sources import SOURCES
from utils.models.checking import sum_words
from utils.runs.digest import choose_updates, parts_to_compute
from utils.training.tree_sum import TreeSum

FLAGS = words("--data digits --model mlp --max_train_samples 96 --max_eval_samples 16 --threads 1")
FLAGS += words("--global_batch_size 16 --microbatches 4 --max_steps 12 --log_every 5 --lr 0.05")
FLAGS += words("--save_every 4 --keep all --report false --eval_every 100 --warmup_steps 0")
UPDATES = 12
VERIFY = words("--run runs/run --verify")


def verified(flags: list[str]) -> str:
    """The line of replay.py, called in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            replay.main(flags)
        except SystemExit:
            pass
    return out.getvalue().strip().splitlines()[-1]


def flip(tensor: torch.Tensor, chance: random.Random) -> None:
    """Flip one bit of a tensor: not its lowest ones, which a sum may round away."""
    bits = tensor.view(torch.int32).view(-1)
    place = chance.randrange(len(bits))
    bits[place] ^= 1 << chance.randrange(20, 31)


def first_update_with(sample: int) -> int:
    """The first update, counted from 1, with a sample; by the order alone."""
    order = permutation(96, 0, 0)
    return int(np.flatnonzero(order == sample)[0]) // 16 + 1


class Damage:
    """Ways to change a run, each named by a method, which returns the update to be found."""

    def __init__(self, chance: random.Random, patch: pytest.MonkeyPatch):
        self.chance, self.patch = chance, patch
        self.update = chance.randrange(UPDATES)

    def train(self) -> None:
        shutil.rmtree("runs/run", ignore_errors=True)
        train.main(["--run_name", "run", *FLAGS])

    def _with_data(self, change) -> int:
        """Train on data of which one sample is changed."""
        sample, load = self.chance.randrange(96), train.load_splits

        def changed(*given):
            data = load(*given)
            return replace(data, train=change(data.train, sample))

        with self.patch.context() as patch:
            patch.setattr(train, "load_splits", changed)
            self.train()
        return first_update_with(sample)

    def label(self) -> int:
        def change(split, sample):
            labels = split.labels.copy()
            labels[sample] = (labels[sample] + self.chance.randrange(1, 10)) % 10
            return replace(split, labels=labels)

        return self._with_data(change)

    def image(self) -> int:
        def change(split, sample):
            index = split.image_index.copy()
            index[sample] = split.image_index[(sample + 1) % 96]
            return replace(split, image_index=index, fingerprint="changed")

        return self._with_data(change)

    def rate(self) -> int:
        rate, nudge = train.learning_rate, 1 + self.chance.choice([-1, 1]) * 0.001

        def nudged(config, step, updates):
            return rate(config, step, updates) * (nudge if step == self.update else 1)

        with self.patch.context() as patch:
            patch.setattr(train, "learning_rate", nudged)
            self.train()
        return self.update + 1

    def skip(self) -> int:
        update = train.train_update

        def skipping(run, batches):
            with self.patch.context() as patch:
                if run.state.step == self.update:
                    patch.setattr(run.optimizer, "step", lambda: None)
                update(run, batches)

        with self.patch.context() as patch:
            patch.setattr(train, "train_update", skipping)
            self.train()
        return self.update + 1

    def bit(self) -> int:
        update, add = train.train_update, TreeSum.add
        number = self.chance.randrange(4)

        def flipping(tree, microbatch, tensors):
            if microbatch == number:
                flip(self.chance.choice(tensors[:4]), self.chance)
            add(tree, microbatch, tensors)

        def watched(run, batches):
            with self.patch.context() as patch:
                if run.state.step == self.update:
                    patch.setattr(TreeSum, "add", flipping)
                update(run, batches)

        with self.patch.context() as patch:
            patch.setattr(train, "train_update", watched)
            self.train()
        return self.update + 1

    def weights(self) -> int:
        if not Path("runs/honest").exists():
            self.train()
            Path("runs/run").rename("runs/honest")
        shutil.rmtree("runs/run", ignore_errors=True)
        shutil.copytree("runs/honest", "runs/run")
        step, other = self.chance.sample([4, 8, 12], 2)
        name = "checkpoints/step-{:08d}/model.safetensors".format
        tensors = load_file(f"runs/honest/{name(step)}")
        if self.chance.random() < 0.5:
            flip(self.chance.choice([*tensors.values()]), self.chance)
        else:
            tensors = load_file(f"runs/honest/{name(other)}")
        save_file(tensors, f"runs/run/{name(step)}", {"format": "pt"})
        rewrite_manifest(Path("runs/run", name(step)).parent)
        return step


KINDS = ("label", "image", "rate", "weights", "skip", "bit")


def find(kind: str, seeds: range) -> list[tuple[int, str]]:
    """Damage runs in these ways; the update to be found, and the line of the verification."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for seed in seeds:
            damage = Damage(random.Random(f"{kind} {seed}"), patch)
            with contextlib.redirect_stdout(io.StringIO()):
                update = getattr(damage, kind)()
            found.append((update, verified([*VERIFY, "all"])))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 35), marks=pytest.mark.full)])
def test_a_changed_run_is_found_with_its_update(kind, seeds):
    (found,) = returned(1, find, kind, seeds, seconds=3000)
    for update, line in found:
        assert f"error: update {update} differs (" in line, (update, line)
    assert len(found) == len(seeds)
