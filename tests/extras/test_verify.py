"""replay.py --verify finds each change of a run, on any topology; --against where two runs part."""

import contextlib
import io
import json
import os
import random
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.make_data import image_folder, pictures
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
from PIL import Image
from safetensors.torch import load_file, save_file

import replay
import train
from extras.verify import choose_updates, parts_to_compute
from utils.config.cli import parse_args
from utils.data.order import permutation
from utils.data.selection import load_data
from utils.runs.manifest import sha256_of
from utils.settings.train import TrainConfig
from utils.training.tree_sum import TreeSum

FLAGS = words("--data digits --model mlp --max_train_samples 96 --max_eval_samples 16 --threads 1")
FLAGS += words("--global_batch_size 16 --max_steps 12 --log_every 5 --lr 0.05")
FLAGS += words("--save_every 4 --keep all --report false --eval_every 100 --warmup_steps 0")
PLAIN = FLAGS
FLAGS = [*FLAGS, *words("--microbatches 4")]
UPDATES = 12
VERIFY = words("--run runs/run --verify")


def flip(tensor: torch.Tensor, chance: random.Random) -> None:
    """Flip one bit of a large value, which a sum does not round away, and which stays finite."""
    sizes = tensor.reshape(-1).abs()
    place = chance.choice((sizes > sizes.max() / 100).nonzero().tolist())[0]
    tensor.view(torch.int32).view(-1)[place] ^= 1 << chance.randrange(18, 26)


def train_again(target=train, name="main", change=None) -> None:
    """Train runs/run anew, with something else in the place of an attribute."""
    shutil.rmtree("runs/run", ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, change or getattr(target, name))
        train.main(["--run_name", "run", *FLAGS])


def with_other_data(field: str, chance: random.Random) -> int:
    """The label or the image of a sample is another."""
    sample, load = chance.randrange(96), train.load_splits

    def changed(*given):
        data = load(*given)
        values = getattr(data.train, field).copy()
        values[sample] = (values[sample] + 1) % 10
        return replace(data, train=replace(data.train, **{field: values}))

    train_again(train, "load_splits", changed)
    return int(np.flatnonzero(permutation(96, 0, 0) == sample)[0]) // 16 + 1  # by the order alone


def with_other_rate(chance: random.Random) -> int:
    """The learning rate of one update is a thousandth larger."""
    at, rate = chance.randrange(UPDATES), train.learning_rate

    def nudged(config, step, updates):
        return rate(config, step, updates) * (1.001 if step == at else 1)

    train_again(train, "learning_rate", nudged)
    return at + 1


def with_other_step(change, chance: random.Random) -> int:
    """Something is changed from the beginning of one update to its end."""
    at, update = chance.randrange(UPDATES), train.train_update

    def changed(run, batches):
        with pytest.MonkeyPatch.context() as patch:
            if run.state.step == at:
                change(patch, run, chance)
            update(run, batches)

    train_again(train, "train_update", changed)
    return at + 1


def skip(patch: pytest.MonkeyPatch, run, chance: random.Random) -> None:
    patch.setattr(run.optimizer, "step", lambda: None)


def flip_a_bit(patch: pytest.MonkeyPatch, run, chance: random.Random, numbers=range(4)) -> None:
    add, number = TreeSum.add, chance.choice(numbers)

    def flipping(tree, microbatch, tensors):
        if microbatch == number:
            flip(chance.choice(tensors[:4]), chance)
        add(tree, microbatch, tensors)

    patch.setattr(TreeSum, "add", flipping)


def with_other_weights(chance: random.Random) -> int:
    """A checkpoint has a changed bit, or the weights of another."""
    train_again()
    step, other = chance.sample([4, 8, 12], 2)
    paths = [f"runs/run/checkpoints/step-{each:08d}/model.safetensors" for each in (step, other)]
    tensors = load_file(paths[chance.randrange(2)])
    flip(chance.choice([*tensors.values()]), chance)
    save_file(tensors, paths[0], {"format": "pt"})
    rewrite_manifest(Path(paths[0]).parent)
    return step


KINDS = {
    "label": partial(with_other_data, "labels"),
    "image": partial(with_other_data, "image_index"),
    "rate": with_other_rate,
    "weights": with_other_weights,
    "skipped step": partial(with_other_step, skip),
    "bit": partial(with_other_step, flip_a_bit),
}
CASES = [(kind, range(1)) for kind in ("label", "weights", "skipped step")]
CASES += [full(kind, range(1, 13)) for kind in KINDS]
CASES += [pytest.param(kind, range(13, 35), marks=pytest.mark.slow) for kind in KINDS]


def find(kind: str, seeds: range) -> list[tuple[int, str]]:
    """Change runs; the update to be found, and the line of its verification."""
    found = []
    for seed in seeds:
        update, errors = KINDS[kind](random.Random(f"{kind} {seed}")), io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
            replay.main([*VERIFY, "all"])
        found.append((update, errors.getvalue()))
    return found


@pytest.mark.parametrize("kind,seeds", CASES)
def test_a_changed_run_is_found_with_its_update(kind, seeds):
    (found,) = returned(1, find, kind, seeds, seconds=3000)
    for update, line in found:
        assert f"error: update {update} differs (" in line, (update, line)
    assert len(found) == len(seeds)


@pytest.mark.full
def test_a_run_of_two_ranks_is_verified_by_one_and_by_three():
    train_run(2, "run", *FLAGS, "--ema_decay", "0.9")
    (outcome,) = run_ranks(1, replay.main, [*VERIFY, "6,10"])
    line = "equal in updates 5 to 6, 9 to 10, and in the weights of none; "
    line += "not compared: step-00000004, "
    assert f"{line}step-00000008, step-00000012, 1, 2, 3, 4, 7, 8, 11, 12\n" in outcome.out
    outcome = run_ranks(3, replay.main, [*VERIFY, "all"])[0]
    line = "equal in updates 1 to 12, and in the weights of step-00000004, step-00000008, step-"
    assert f"{line}00000012; not compared: nothing\n" in outcome.out
    checkpoint = Path("runs/run/checkpoints/step-00000012")
    tensors = load_file(checkpoint / "ema.safetensors")
    flip(next(iter(tensors.values())), random.Random(0))
    save_file(tensors, checkpoint / "ema.safetensors")
    rewrite_manifest(checkpoint)
    assert f"differs ({checkpoint}/ema.safetensors)" in refused(replay.main, *VERIFY, "12")


def train_with_a_bit_flipped_on_rank_1() -> None:
    update = train.train_update

    def changed(run, batches):
        with pytest.MonkeyPatch.context() as patch:
            if run.state.step == 6 and run.ranks.topology.rank == 1:
                flip_a_bit(patch, run, random.Random(0), [3])
            update(run, batches)

    train_again(train, "train_update", changed)


@pytest.mark.full
def test_a_bit_that_flips_on_one_rank_is_found_and_parts_two_runs():
    train_run(1, "other", *FLAGS)
    returned(2, train_with_a_bit_flipped_on_rank_1)
    line = refused(replay.main, *VERIFY, "all", processes=2)
    split = load_data(parse_args(TrainConfig, "", FLAGS), None).train
    rows = split.image_index[permutation(96, 0, 1)[:12]]  # the first of the second epoch
    samples = f"its samples: {', '.join(map(str, rows.tolist()))}, ... (16 in all)"
    assert f"error: update 7 differs (digest); {samples}" in line
    line = refused(replay.main, *words("--run runs/run --against runs/other"))
    assert f"update 7 differs (the first, from runs/other); {samples}" in line


@pytest.mark.full
@pytest.mark.parametrize("model,update", [("fastnet", 1), full("mlp", 2)])
def test_a_changed_file_is_named(model, update):
    """It shows in the update that uses it, but fastnet's first layer comes from all images."""
    image_folder("photos", {"a": 20, "b": 20}, (28, 28))
    flags = words(f"--data photos --eval_fraction 0.2 --model {model} --global_batch_size 16")
    flags += words("--microbatches 2 --max_steps 2 --log_every 2 --threads 1 --report false")
    train_run(1, "run", *flags)
    data = load_data(parse_args(TrainConfig, "", flags), None)
    name = data.train.describe(int(permutation(32, 0, 0)[20]))  # in the second update
    Image.fromarray(pictures(1, (28, 28), seed=7)[0]).save(name)
    line = refused(replay.main, *VERIFY, "all", processes=2)
    assert f"error: update {update} differs (digest); its samples: " in line
    assert f"; 1 of 40 images changed: {name[7:]}; use the data" in line


@pytest.mark.full
def test_a_run_that_was_killed_and_resumed_has_the_digests_of_a_whole_one():
    """Those of the updates between the last record and the checkpoint are in the checkpoint."""
    train_run(1, "run", *FLAGS)
    shutil.copytree("runs/run", "runs/whole")
    log, whole = Path("runs/run/log.jsonl"), records("run", "train")
    lines = log.read_text().splitlines(True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))
    shutil.rmtree("runs/run/checkpoints/step-00000012")
    again = [
        record["digest"]
        for record in train_run(2, "run", *FLAGS, "--resume", "auto")[-4:]
        if record["kind"] == "train"
    ]
    assert again == [record["digest"] for record in whole[1:]]
    assert [*map(len, again)] == [5, 2]


@pytest.mark.full
def test_a_run_that_began_at_a_checkpoint_of_another_is_verified_from_there():
    train_run(1, "other", *FLAGS)
    start = ["--resume", "runs/other/checkpoints/step-00000008"]
    train_run(1, "run", *start, *words("--threads 1 --lr 0.04 --report false"))
    assert [len(record["digest"]) for record in records("run", "train")] == [2, 2]
    (outcome,) = run_ranks(1, replay.main, [*VERIFY, "all"])
    line = "equal in updates 9 to 12, and in the weights of step-00000012; not compared: step-"
    assert f"{line}00000008\n" in outcome.out
    shutil.rmtree("runs/other/checkpoints")
    line = refused(replay.main, *words("--run runs/run --against runs/other"))
    assert "update 9 differs (the first, from runs/other)" in line


def _compiled_models(flags: list[str]) -> int:
    compiled, original = [], torch.nn.Module.compile

    def counted(module, **named):
        compiled.append(module)
        original(module, **named)

    torch.nn.Module.compile = counted
    replay.main(flags)
    return len(compiled)


@pytest.mark.full
def test_each_part_of_a_compiled_run_is_compiled(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    train_run(1, "run", *FLAGS)
    assert returned(1, _compiled_models, [*VERIFY, "2,6,10"]) == [3]


@pytest.mark.full
def test_what_cannot_be_verified_is_one_line():
    train_run(1, "run", *PLAIN, "--max_steps", "2")
    assert all("digest" not in record for record in records("run"))
    line = "only --microbatches writes them; start a new run with --microbatches"
    assert line in refused(replay.main, *VERIFY, "all")
    for empty in ("--verify", "--against"):
        line = refused(replay.main, "--run", "runs/run", empty, "")
        assert "give --update, --verify or --against" in line
    line = refused(replay.main, *words("--run runs/run --against runs/run"))
    assert "no digests in common; train both runs with --microbatches" in line
    assert "give --update, --verify or --against" in refused(replay.main, "--run", "runs/run")
    line = refused(replay.main, *words("--run runs/run --update 1"), processes=2)
    assert "--update needs one process; start it with plain python" in line


def test_updates_are_chosen_and_computed_from_the_nearest_checkpoint():
    known = range(1, 21)
    lacking = "no digests of updates"
    assert choose_updates("all", known, known) == [*known] and choose_updates(
        "7,3", known, known
    ) == [3, 7]
    assert len({*choose_updates("random:5", known, known)} & {*known}) == 5
    assert choose_updates("random:50", known, known) == [*known]
    for wrong, absent in {
        "0": "0",
        "3,21": "21",
        "x": "x",
        "random:0": "",
        "random:x": "random:x",
    }.items():
        with pytest.raises(ValueError, match=f"{lacking} {absent} are saved"):
            choose_updates(wrong, known, known)
    with pytest.raises(ValueError, match=f"{lacking} 1, 2 are saved"):
        choose_updates("all", range(3, 21), known)
    assert parts_to_compute([3, 7, 9, 16], [5, 10, 15]) == {0: 3, 5: 9, 15: 16}
    assert parts_to_compute(known, [5, 10]) == {0: 20} == parts_to_compute([10, 20], [10])


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
MARK = r"<!-- run by tests/extras/test_verify.py[^\n]*\n```bash\n(.*?)^```"


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
