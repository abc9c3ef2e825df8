"""replay.py --verify computes a run again, on any number of processes, and finds each change;
--against finds where two runs part.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    BIN,
    ROOT,
    full,
    records,
    refused,
    rewrite_manifest,
    start,
    train_run,
    words,
)
from safetensors.torch import load_file, save_file

import replay
import train
from utils.config.cli import parse_args
from utils.config.settings import TrainConfig
from utils.data.order import permutation
from utils.data.selection import load_data
from utils.models.checking import sum_words
from utils.runs.digest import choose_updates, parts_to_compute
from utils.runs.manifest import sha256_of
from utils.training.tree_sum import TreeSum

FLAGS = words("--data digits --model mlp --max_train_samples 96 --max_eval_samples 16 --threads 1")
FLAGS += words("--global_batch_size 16 --max_steps 12 --log_every 5 --lr 0.05")
FLAGS += words("--save_every 4 --keep all --report false --eval_every 100 --warmup_steps 0")
PLAIN = FLAGS
FLAGS = [*FLAGS, *words("--microbatches 4")]
UPDATES = 12
VERIFY = words("--run runs/run --verify")


def verified(flags: list[str]) -> str:
    """The line of replay.py, called in this process."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.suppress(SystemExit),
    ):
        replay.main(flags)
    return out.getvalue().strip().splitlines()[-1]


def flip(tensor: torch.Tensor, chance: random.Random) -> None:
    """Flip one bit of a large value, which a sum does not round away, and which stays finite."""
    sizes = tensor.reshape(-1).abs()
    place = chance.choice((sizes > sizes.max() / 100).nonzero().tolist())[0]
    tensor.view(torch.int32).view(-1)[place] ^= 1 << chance.randrange(18, 26)


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


CASES = [(kind, range(1)) for kind in ("label", "skip", "weights")]
CASES += [full(kind, range(1, 35)) for kind in KINDS]


@pytest.mark.parametrize("kind,seeds", CASES)
def test_a_changed_run_is_found_with_its_update(kind, seeds):
    (found,) = returned(1, find, kind, seeds, seconds=3000)
    for update, line in found:
        assert f"error: update {update} differs (" in line, (update, line)
    assert len(found) == len(seeds)


def add_flipped_bit(flags: list[str], update: int) -> None:
    """Train; on rank 1, a bit of a gradient is flipped in one update."""
    add = TreeSum.add
    taken = []

    def flipping(tree, number, tensors):
        taken.append(number)
        if len(taken) == 2 * update and tree.own.start:  # the last of its two microbatches
            flip(tensors[0], random.Random(0))
        add(tree, number, tensors)

    TreeSum.add = flipping
    train.main(flags)


def test_a_run_of_two_ranks_is_verified_by_one_and_by_three():
    """Also from the middle, and against a run of one process; a bit that flips on one rank is
    found.
    """
    train_run(2, "run", *FLAGS, "--ema_decay", "0.9")
    (outcome,) = run_ranks(1, replay.main, [*VERIFY, *words("6,10 --json verified.json")])
    assert outcome.out.endswith("equal in updates 5 to 6, 9 to 10, and in the weights of \n")
    outcomes = run_ranks(3, replay.main, [*VERIFY, *words("all --json verified.json")])
    line = "runs/run: equal in updates 1 to 12, and in the weights of "
    line += "step-00000004, step-00000008, step-00000012\n"
    assert [outcome.out.endswith(line) for outcome in outcomes] == [True, False, False]
    found = json.loads(Path("verified.json").read_text())
    assert found["updates"] == ["1 to 12"]
    assert {"model.safetensors", "ema.safetensors"} <= found["checkpoints"]["step-00000012"].keys()
    returned(2, add_flipped_bit, ["--run_name", "other", *FLAGS, "--ema_decay", "0.9"], 7)
    other = words("--run runs/other --verify")
    assert "error: update 7 differs (digest); its samples: " in refused(
        replay.main, *other, "all", processes=2
    )
    # of the average alone
    checkpoint = Path("runs/run/checkpoints/step-00000012")
    tensors = load_file(checkpoint / "ema.safetensors")
    flip(next(iter(tensors.values())), random.Random(0))
    save_file(tensors, checkpoint / "ema.safetensors")
    assert f"{checkpoint}/ema.safetensors: damaged" in refused(replay.main, *VERIFY, "12")
    rewrite_manifest(checkpoint)
    assert f"differs ({checkpoint}/ema.safetensors)" in refused(replay.main, *VERIFY, "12")
    line = refused(replay.main, *words("--run runs/other --against runs/run"))
    split = load_data(parse_args(TrainConfig, "", FLAGS), None).train
    rows = split.image_index[permutation(96, 0, 1)[:12]]  # the first of the second epoch
    samples = ", ".join(map(str, rows.tolist()))
    assert f"update 7 differs (the first, from runs/run); its samples: {samples}, ... (16" in line


def test_a_run_that_was_killed_and_resumed_has_the_digests_of_a_whole_one():
    train_run(1, "whole", *FLAGS)
    train_run(1, "run", *FLAGS, "--max_steps", "12", "--save_seconds", "1e-9")
    log = Path("runs/run/log.jsonl")
    kept = [line for line in log.read_text().splitlines(True) if json.loads(line)["step"] <= 5]
    log.write_text("".join(kept))
    for step in (9, 10, 11, 12):
        shutil.rmtree(f"runs/run/checkpoints/step-{step:08d}", ignore_errors=True)
    train_run(2, "run", *FLAGS, "--resume", "auto")
    assert [each["digest"] for each in records("run", "train")] == [
        each["digest"] for each in records("whole", "train")
    ]
    assert [len(each["digest"]) for each in records("run", "train")] == [5, 5, 2]
    assert "equal in 12 updates" in verified(words("--run runs/run --against runs/whole"))


def test_what_cannot_be_verified_is_one_line():
    train_run(1, "run", *PLAIN, "--max_steps", "2")
    assert all("digest" not in record for record in records("run"))
    assert "the log has no such digests, which only --microbatches gives" in refused(
        replay.main, *VERIFY, "all"
    )
    line = refused(replay.main, *words("--run runs/run --against runs/run"))
    assert "no digests in common; train both runs with --microbatches" in line
    assert "give --update, --verify or --against" in refused(replay.main, "--run", "runs/run")
    line = refused(replay.main, *words("--run runs/run --update 1"), processes=2)
    assert "--update needs one process; start it with plain python" in line


def test_updates_are_chosen_and_computed_from_the_nearest_checkpoint():
    known = range(1, 21)
    assert choose_updates("all", known) == [*known]
    assert choose_updates("7,3", known) == [3, 7]
    assert len({*choose_updates("random:5", known)} & {*known}) == 5
    for wrong in ("0", "3,21", "x", "random:0", "3,3"):
        with pytest.raises(ValueError, match="the log has no such digests"):
            choose_updates(wrong, known)
    starts = [5, 10, 15]
    assert parts_to_compute([3, 7, 9, 16], starts) == {0: 3, 5: 9, 15: 16}
    assert parts_to_compute(known, starts) == {0: 20}
    assert parts_to_compute([10, 11], starts) == {5: 11}
    assert parts_to_compute([10, 12], [10]) == {0: 12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_of_words_depends_on_each_bit_and_position(dtype):
    values = torch.randn(9001).to(dtype)
    found = {sum_words(values).item()}
    view = values.view(torch.uint8)
    places = [*range(0, len(view), 997), len(view) - 1]
    for place in places:
        for bit in range(8):
            view[place] ^= 1 << bit
            found.add(sum_words(values).item())
            view[place] ^= 1 << bit
    found |= {sum_words(values.roll(1)).item(), sum_words(values.flip(0)).item()}
    assert len(found) == 8 * len(places) + 3


@pytest.mark.full
@pytest.mark.parametrize("trained,by", [(1, 2), (2, 3), (3, 1)])
def test_honest_updates_are_equal(trained, by):
    """670 updates each, of a model with dropout and batch statistics, augmented and mixed."""
    more = words("--max_steps 670 --model mnist_cnn --mixup 0.4 --crop_padding 2 --save_every 60")
    more += words("--optimizer adamw --ema_decay 0.9 --max_train_samples 90 --clip_norm 1")
    train_run(trained, "run", *FLAGS, *more, seconds=3000)
    outcome = run_ranks(by, replay.main, [*VERIFY, "all"], seconds=3000)[0]
    assert "equal in updates 1 to 670, and in the weights of step-00000060" in outcome.out


PAGES = [(ROOT / page).read_text() for page in ("docs/compare.md", "SECURITY.md")]
MARK = r"<!-- run by tests/test_verify.py[^\n]*\n```bash\n(.*?)^```"


@pytest.mark.full
def test_the_commands_of_the_pages_run():
    for name in ("accelerate_configs", "replay.py"):
        Path(name).symlink_to(ROOT / name)
    for name in ("NAME", "OTHER"):
        train_run(1, name, *FLAGS, "--max_steps", "41", "--cpu")
    blocks = [block for page in PAGES for block in re.findall(MARK, page, re.M | re.S)]
    assert len(blocks) == 3
    for block in blocks if shutil.which("model_signing") else blocks[:2]:
        block = block.replace("replay.py --run", "replay.py --cpu --run")
        code, _, err = start("/bin/bash", "-ec", block, PATH=f"{BIN}:{os.environ['PATH']}")
        assert code == 0, err
    statement = json.loads(Path("release/statement.json").read_text())
    saved = Path("runs/NAME/checkpoints/step-00000041/model.safetensors")
    assert statement["subject"][0]["digest"] == {"sha256": sha256_of(saved)}
    verified = json.loads(Path("release/verified.json").read_text())
    assert verified["updates"] == ["1 to 41"] and verified["settings"].startswith("format: ")
    manifest = json.loads(saved.with_name("manifest.json").read_text())
    assert verified["checkpoints"]["step-00000041"] == manifest["files"]
