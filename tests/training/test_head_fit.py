"""A new head is fitted before all layers are trained: the same head on any number of processes."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import (
    ROOT,
    full,
    kill_myself,
    optimizer_tensors,
    records,
    refused,
    rewrite_manifest,
    same_tensors,
    steps,
    train_run,
    weights,
    words,
    working_in,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

import eval as evaluation
import replay
import train
from extras.head_alone import STORED
from utils.data.order import permutation
from utils.data.spec import InputSpec
from utils.models.last_part import find_last_part
from utils.models.layers import head_prefixes
from utils.models.zoo import build_model
from utils.runs import init_from
from utils.settings.train import TrainConfig
from utils.training import head_fit
from utils.training.evaluation import Evaluator

RUN = words("--data new --init_from runs/source --threads 1 --num_workers 0 --epochs 3")
RUN += words("--report false --cache_dir cache")
START = Path("runs/run/checkpoints/step-00000000")
ALONE = words("--lr 1e-30 --weight_decay 0 --max_steps 1")  # all layers stay as they were fitted


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the sets `old`, classes a and b, and `new`, a, b and c, and runs/source."""
    folder = tmp_path_factory.mktemp("head_fit")
    with working_in(folder):
        for seed, (name, classes) in enumerate((("old", "ab"), ("new", "abc"), ("other", "xyz"))):
            for part, count in (("train", 12), ("val", 8)):
                folders = dict.fromkeys(classes, count)
                for path in image_folder(f"{name}/{part}", folders, (40, 40), seed=seed + count):
                    pixels = np.asarray(Image.open(path)) // 2
                    colour = 120 * np.eye(3, dtype=np.uint8)[classes.index(path.parent.name)]
                    Image.fromarray(pixels + colour).save(path)
        flags = words("--data old --model timm/test_resnet --mean 0.4 --lr 0.01 --threads 1")
        train_run(1, "source", *flags, *words("--max_steps 8 --report false --channels 3"))
    return folder


@pytest.fixture(autouse=True)
def folder(made, own_folders):
    shutil.copytree(made, ".", dirs_exist_ok=True, ignore=shutil.ignore_patterns("home"))


def head_of(name: str, which: str = "step-00000000") -> dict:
    tensors = load_file(f"runs/{name}/checkpoints/{which}/model.safetensors")
    return {key: each for key, each in tensors.items() if key.startswith("fc.")}


def features_by_hand(data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The features of the training images before the head of runs/source, and their classes."""
    tensors = weights("source", "best")
    model = timm.create_model("test_resnet", num_classes=2)
    model.load_state_dict(tensors)
    model.eval().fc = nn.Identity()
    paths = sorted(Path(data, "train").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    images = torch.from_numpy((pixels / 255 - 0.4) / 0.5).float().permute(0, 3, 1, 2)
    names = sorted({path.parent.name for path in paths})
    with torch.no_grad():
        return model(images), torch.tensor([names.index(path.parent.name) for path in paths])


@pytest.mark.parametrize("data", ["new", full("other")])
def test_the_head_is_that_of_four_epochs_in_plain_pytorch_and_known_rows_stay(data):
    train_run(1, "run", *RUN, "--data", data, "--max_steps", "1")
    features, labels = features_by_hand(data)
    there = weights("source", "best")
    head = nn.Linear(features.shape[1], 3)
    known = 2 if data == "new" else 0  # classes a and b
    with torch.no_grad():
        for own, name in ((head.weight, "fc.weight"), (head.bias, "fc.bias")):
            own.zero_()
            own[:known] = there[name][:known]
    groups = [{"params": [head.weight], "weight_decay": 5e-4}, {"params": [head.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.05 * 8 / 128, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05 * 8 / 128, total_steps=20, cycle_momentum=False
    )
    losses = []
    for epoch in range(4):
        for rows in torch.from_numpy(permutation(36, 0, epoch)).split(8):
            loss = cross_entropy(head(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            with torch.no_grad():
                head.weight[:known], head.bias[:known] = (
                    there[name][:known] for name in ("fc.weight", "fc.bias")
                )
    fitted = head_of("run")
    torch.testing.assert_close(fitted["fc.weight"], head.weight.data, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fitted["fc.bias"], head.bias.data, rtol=1e-4, atol=1e-6)
    assert torch.equal(fitted["fc.weight"][:known], there["fc.weight"][:known])
    (record,) = records("run", "head")
    assert (record["step"], record["images"], record["updates"]) == (0, 36, 20)
    means = np.reshape(losses, (4, 5)).mean(1)
    assert record["losses"] == pytest.approx(means.tolist(), rel=1e-4)
    assert means[-1] < means[0]
    others = {name: each for name, each in there.items() if not name.startswith("fc.")}
    saved = load_file(START / "model.safetensors")
    assert same_tensors({name: saved[name] for name in others}, others)


@pytest.mark.parametrize("more", [[], full(words("--flip true --ema_decay 0.9"))])
def test_the_bits_are_those_of_one_process_on_two_and_three(more):
    flags = [*RUN, *words("--microbatches 4 --keep 9"), *more]
    for processes in (1, 2, 3):
        train_run(processes, f"on-{processes}", *flags, "--cache_dir", f"cache-{processes}")
        assert same_tensors(head_of(f"on-{processes}"), head_of("on-1"))
        assert same_tensors(weights(f"on-{processes}"), weights("on-1"))
    losses = [records(f"on-{processes}", "head")[0]["losses"] for processes in (1, 2, 3)]
    assert losses[0] == losses[1] == losses[2]


def train_and_kill(flags: list[str], place: str, number: int = signal.SIGKILL) -> None:
    """Train, and send this rank a signal after the fit, in the evaluation of update 0, or after
    update 7.
    """
    fit, evaluate, update = head_fit.fit_on, Evaluator.rows, train.train_update

    def fitted(*given):
        found = fit(*given)
        if place == "fit":
            kill_myself(number)
        return found

    def evaluated(evaluator, stopping, keep):
        if place == "evaluation":
            kill_myself(number)
        return evaluate(evaluator, stopping, keep)

    def updated(run, batches):
        if place == "update" and run.state.step == 7:
            kill_myself(number)
        update(run, batches)

    head_fit.fit_on, Evaluator.rows, train.train_update = fitted, evaluated, updated
    train.main(flags)


@pytest.mark.parametrize("place, processes", [("fit", 1), ("evaluation", 2), full("update", 2)])
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(place, processes):
    flags = [*RUN, *words("--microbatches 2 --run_name")]
    train_run(1, "whole", *flags[:-1])
    outcomes = run_ranks(processes, train_and_kill, [*flags, "run"], place)
    assert {outcome.code for outcome in outcomes} == {-signal.SIGKILL}
    assert START.exists() == (place == "update")
    train_run(processes, "run", *flags[:-1], "--resume", "auto")
    for file in ("model.safetensors", "optimizer.bin"):
        assert same_tensors(weights("run", file=file), weights("whole", file=file))
    assert steps("run", "eval") == steps("whole", "eval") == [0, 5, 10, 15]
    # a run that is killed in the fit has no folder yet
    assert len(records("run", "head")) == (2 if place == "evaluation" else 1)


def test_a_run_that_is_stopped_at_update_0_evaluates_its_head_when_it_goes_on():
    flags = [*RUN, "--run_name", "run"]
    (outcome,) = run_ranks(1, train_and_kill, flags, "evaluation", signal.SIGTERM)
    assert outcome.code == 75 and "Stopped after update 0 of 15" in outcome.out
    assert START.exists() and not steps("run", "eval")
    train_run(1, "run", *RUN, "--resume", "auto")
    train_run(1, "whole", *RUN)
    assert steps("run", "eval") == [0, 5, 10, 15] and len(records("run", "head")) == 1
    assert same_tensors(weights("run"), weights("whole"))


def test_the_head_alone_can_be_the_best_and_is_compared_with_the_last_weights():
    flags = words("--lr 3 --lr_schedule constant --run_name run")
    (outcome,) = run_ranks(1, train.main, [*RUN, *flags])
    assert outcome.code == 0
    evaluations = records("run", "eval")
    first, last = evaluations[0]["accuracy"], evaluations[-1]["accuracy"]
    assert evaluations[0]["step"] == 0 and first == max(each["accuracy"] for each in evaluations)
    assert Path("runs/run/checkpoints/best").read_text().strip() == START.name
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("all layers")]
    assert line == records("run", "head_alone")[0]["text"]
    assert line.startswith(f"all layers {last:.4f}, the head alone (update 0) {first:.4f}: ")
    assert line.endswith(" on 24 images; best: update 0")
    shown = float(line.split(": ")[1].split()[0])
    assert shown == pytest.approx(100 * (last - first), abs=0.1) and shown < 0
    assert "24 images" in line and "(best, update 0)" in outcome.out
    flags = words("--ckpt runs/run --cache_dir cache --threads 1")
    (found,) = returned(1, evaluation.main, flags)
    assert found["accuracy"] == first
    stored = np.load(Path("runs/run", STORED))
    assert (stored["top"][:, 0] == stored["labels"]).mean() == first


def test_a_head_that_all_layers_leave_as_it_is_cannot_be_told_apart_and_the_page_says_so():
    flags = [*RUN, *ALONE, *words("--report true --run_name run")]
    (outcome,) = run_ranks(1, train.main, flags)
    line = records("run", "head_alone")[0]["text"]
    assert line in outcome.out and "+0 points of accuracy (95 % interval " in line
    assert "), cannot be told apart on 24 images; best: update 0" in line
    assert line in Path("runs/run/report.html").read_text()


def fit_differently(flags: list[str]) -> None:
    """Train with a fit whose result depends on the rank."""
    fit = head_fit.fit_on

    def differing(features, plan, part, head, *others):
        losses = fit(features, plan, part, head, *others)
        with torch.no_grad():
            head[0].add_(int(os.environ.get("RANK", 0)))
        return losses

    head_fit.fit_on = differing
    train.main(flags)


def test_all_ranks_take_the_head_of_rank_0_which_must_be_theirs_with_microbatches():
    line = refused(fit_differently, *RUN, *words("--microbatches 2 --run_name bits"), processes=2)
    assert "rank 1 has a different head after its fit than rank 0" in line
    outcomes = run_ranks(2, fit_differently, [*RUN, *ALONE, "--run_name", "run"])
    assert [outcome.code for outcome in outcomes] == [0, 0]
    train_run(1, "alone", *RUN, *ALONE)
    for name, tensor in head_of("alone").items():
        torch.testing.assert_close(head_of("run")[name], tensor, rtol=1e-4, atol=1e-6)


def sharded(flags: list[str]) -> None:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    train.main(flags)


def fit_differently_sharded(flags: list[str]) -> None:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    fit_differently(flags)


@pytest.mark.full
def test_the_shards_of_all_ranks_are_those_of_the_head_of_rank_0():
    returned(2, fit_differently_sharded, [*RUN, *ALONE, "--run_name", "run"])
    train_run(1, "alone", *RUN, *ALONE)
    for name, tensor in head_of("alone").items():
        torch.testing.assert_close(head_of("run")[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_model_that_fsdp_shards_starts_from_the_same_head():
    flags = [*RUN, *words("--channels_last false --max_steps 8 --log_every 1 --keep 9")]
    train_run(2, "ddp", *flags)
    returned(2, sharded, [*flags, "--run_name", "fsdp"])
    for name, tensor in head_of("ddp").items():
        torch.testing.assert_close(head_of("fsdp")[name], tensor, rtol=1e-5, atol=1e-7)
    losses = [
        [record["loss"] for record in records(name) if record["kind"] in ("train", "eval")]
        for name in ("ddp", "fsdp")
    ]
    assert len(losses[0]) == 8 + 3 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    tensors = optimizer_tensors(Path("runs/fsdp/checkpoints/step-00000008"))
    assert {each.item() for name, each in tensors.items() if name.endswith("/step")} == {8}
    shutil.rmtree("runs/fsdp/checkpoints/step-00000008")
    for path in Path("runs/fsdp/checkpoints").glob("step-0000000[1-7]"):
        shutil.rmtree(path)
    (outcome, _) = run_ranks(2, sharded, [*flags, *words("--run_name fsdp --resume auto")])
    assert "start new" not in outcome.out
    again = [record["loss"] for record in records("fsdp", "train")]
    assert again == pytest.approx([each["loss"] for each in records("ddp", "train")], rel=1e-3)


@pytest.mark.parametrize("fold", [[], full(["--fold", "1/3"])])
def test_the_features_are_those_of_the_recipe_that_trains_the_head_only(fold):
    flags = [*RUN, *words("--flip true --max_steps 1 --keep 9")]
    train_run(1, "plain", *flags, *fold)
    changed = words("--crop_padding 4 --color_jitter 0.4 --cutout 9 --cache_dir other")
    train_run(1, "changed", *flags, *fold, *changed)
    assert same_tensors(head_of("plain"), head_of("changed"))
    recipe = ["--config", str(ROOT / "recipes/head.yaml"), *words("--model timm/test_resnet")]
    recipe += [*words("--max_steps 1 --run_name head"), *fold]
    for cache in ("cache", "other"):
        name = f"head-{cache}"
        flags = [*RUN, *recipe, "--cache_dir", cache, "--run_name", name]
        (outcome,) = run_ranks(1, train.main, flags)
        assert outcome.code == 0 and "training: augmented views: 2, found in " in outcome.out
    assert same_tensors(weights("head-cache"), weights("head-other"))


def train_with(name: str, value: int, flags: list[str]) -> None:
    setattr(head_fit, name, value)
    train.main(flags)


def test_large_sets_are_fitted_on_a_sample_of_their_images():
    config = TrainConfig(pretrained=True, mixup=0.5, lr=3, global_batch_size=7, min_scale=0.1)
    fits = [head_fit.settings_of_fit(config, images) for images in (36, 245, 897, 20_000)]
    assert [fit.global_batch_size for fit in fits] == [8, 32, 128, 128]
    assert {(fit.mixup, fit.optimizer, fit.epochs, fit.min_scale) for fit in fits} == {
        (0.0, "sgd", head_fit.EPOCHS, 1.0)
    }
    assert [fit.lr for fit in fits] == [0.05 / 16, 0.05 / 4, 0.05, 0.05]
    for most, value in (("MOST_IMAGES", 20), ("MOST_NUMBERS", 20 * 96)):
        returned(1, train_with, most, value, [*RUN, "--run_name", most, "--max_steps", "1"])
        assert records(most, "head")[0]["images"] == 20


@pytest.mark.parametrize(
    "more, reason",
    [
        ("--fit_head false", ""),
        ("--freeze backbone", ""),
        ("--data old", "the weights have it already"),
        ("--channels 1", "the weights have no conv1.0.weight"),
        ("--model_args {drop_rate:0.5}", ""),
    ],
)
def test_a_head_is_fitted_where_it_is_new_and_else_the_table_says_why(more, reason):
    (outcome,) = run_ranks(
        1, train.main, [*RUN, *words(more), *words("--max_steps 1 --run_name r")]
    )
    assert outcome.code == 0, outcome.err
    fitted = "drop_rate" in more
    assert bool(records("r", "head")) == fitted
    assert (steps("r", "eval")[0] == 0) == fitted
    if reason:
        assert f"the head is not fitted first: {reason}" in outcome.out


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_that_began_without_a_fit_goes_on_without_one(kept):
    train_run(1, "run", *RUN, *words("--fit_head false --stop_after 5"))
    checkpoint = Path("runs/run/checkpoints/step-00000005")
    for folder in (Path("runs/run"), checkpoint):
        settings = folder / "config.yaml"
        text = settings.read_text()
        settings.write_text(text.replace("fit_head: false\n", ""))  # as of an older version
    rewrite_manifest(checkpoint)
    if not kept:
        shutil.rmtree(checkpoint)
    train_run(1, "run", *words("--resume auto --report false --cache_dir cache"))
    assert not records("run", "head") and steps("run", "eval")[-3:] == [5, 10, 15]


def differ_in_the_backbone(flags: list[str]) -> None:
    copy = init_from.copy_source

    def differing(module, *others):
        match = copy(module, *others)
        with torch.no_grad():
            module.conv1[0].weight.mul_(1 - 2 * int(os.environ.get("RANK", 0)))
        return match

    init_from.copy_source = differing
    train.main(flags)


def test_features_of_different_weights_are_refused():
    line = refused(differ_in_the_backbone, *RUN, "--run_name", "run", processes=2)
    assert "rank 1 has different weights at the start than rank 0" in line


def test_a_metric_that_is_undefined_leaves_out_the_comparison():
    shutil.rmtree("old/val/b")
    flags = words("--data old --init_from runs/source/ --task binary --best_metric auc")
    (outcome,) = run_ranks(1, train.main, [*RUN, *flags, "--run_name", "run"])
    assert outcome.code == 0 and steps("run", "eval")[0] == 0
    assert not records("run", "head_alone")


def test_verify_fits_the_head_again():
    train_run(1, "run", *RUN, "--microbatches", "2", "--keep", "9")
    (outcome,) = run_ranks(1, replay.main, words("--run runs/run --verify all"))
    said = outcome.out
    assert "step-00000000" in said and "not compared: nothing" in said
    tensors = load_file(START / "model.safetensors")
    tensors["fc.bias"][2] += 1e-3
    save_file(tensors, START / "model.safetensors", {"format": "pt"})
    rewrite_manifest(START)
    line = refused(replay.main, *words("--run runs/run --verify all"))
    assert "model.safetensors: differs from the weights at the start" in line


@pytest.mark.parametrize(
    "name", ["vgg11", "efficientnet_b0", "convnext_tiny", "timm/vit_tiny_patch16_224"]
)
def test_the_last_part_of_a_model_in_training_is_that_of_its_head(name):
    spec = InputSpec(*[224 if "vit" in name else 32] * 2, 3, [0.5] * 3, [0.5] * 3)
    model = build_model(TrainConfig(model=name), spec, 3)
    names = [each for each, _ in model.named_parameters() if each.startswith(head_prefixes(model))]
    part, reason = find_last_part(model, spec, names)
    assert part is not None, reason
    inside = {id(each) for each in part.parameters()}
    assert inside >= {id(model.get_parameter(each)) for each in names} and model.training
