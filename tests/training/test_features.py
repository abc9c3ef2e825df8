"""Cached features: the numbers of a run that computes the frozen layers for each batch."""

import copy
import json
import re
import shutil
import signal
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.make_data import image_folder, pictures
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import (
    ROOT,
    records,
    refused,
    same_tensors,
    slow_train,
    train_run,
    weights,
    words,
    working_in,
)
from helpers.waiting import until
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import eval as evaluation
import export
import predict
import replay
import train
from extras import first_batch
from utils.data.augment import Augmentation, ShiftAndFlip
from utils.data.datasets import ArrayDataset
from utils.data.decoders import DECODERS
from utils.data.order import Microbatch
from utils.data.spec import InputSpec
from utils.models.last_part import find_last_part
from utils.models.layers import freeze
from utils.models.zoo import build_model
from utils.runs.manifest import find_checkpoint, read_pointer, sha256_of
from utils.settings.train import TrainConfig

CLASSES = ("ant", "bee", "wasp")
FLAGS = words("--init_from runs/source --freeze backbone --threads 1 --num_workers 0 --lr 0.05")
FLAGS += words("--global_batch_size 12 --max_steps 30 --log_every 1 --eval_every 10 --ema_decay")
FLAGS += ["0.9", *words("--save_every 3 --report false --flip")]  # 4 updates an epoch
SMALL = [*FLAGS, *words("--data small --image_size 32 --crop_padding 4")]
PHOTOS = [*FLAGS, *words("--data photos --image_size 100 --min_scale 0.3")]
CENTRE = words("--min_scale 1 --crop_padding 0 --flip false")
VIEWS = ["--feature_views", "3"]
FULL = pytest.mark.full
FILES = ("model.safetensors", "ema.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with small images, photographs, and runs/source, whose batch statistics are those of
    training.
    """
    folder = tmp_path_factory.mktemp("features")
    with working_in(folder):
        for seed, (name, size) in enumerate({"small": (32, 32), "photos": (110, 130)}.items()):
            image_folder(f"{name}/train", dict.fromkeys(CLASSES, 16), size, seed=2 * seed)
            image_folder(f"{name}/val", dict.fromkeys(CLASSES, 7), size, seed=2 * seed + 1)
        flags = words("--data small --model timm/test_resnet --mean 0.4 --lr 0.01 --threads 1")
        flags += words("--global_batch_size 16 --max_steps 6 --report false")
        train_run(1, "source", *flags)
    return folder


@pytest.fixture(autouse=True)
def folder(made, own_folders):
    """A copy of `made` with empty caches."""
    shutil.copytree(made, ".", dirs_exist_ok=True, ignore=shutil.ignore_patterns("home"))


def in_turn(views: int, flags: list[str]) -> None:
    """Train on images whose random numbers in epoch e are those of epoch e modulo `views`."""
    draw = Augmentation.draw
    Augmentation.draw = lambda self, batch: draw(self, batch._replace(epoch=batch.epoch % views))
    train.main(flags)


def numbers(name: str) -> list[float]:
    """Losses and accuracies of all updates, and of all evaluations of the weights and of their
    average.
    """
    found = [record for record in records(name) if record["kind"] in ("train", "eval")]
    assert len(found) == 30 + 3 * 2
    return [record[key] for record in found for key in ("loss", "accuracy") if key in record]


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "more"),
    [(SMALL, VIEWS), *(pytest.param(PHOTOS, more, marks=FULL) for more in ([], VIEWS))],
)
def test_losses_on_cached_features_are_those_of_layers_computed_for_each_batch(data, more):
    plain = [*data, *([] if more else CENTRE), *words("--feature_views 0 --run_name plain")]
    returned(1, in_turn, 3 if more else 1, plain)
    for processes in (1, 3):
        name = f"on-{processes}"
        train_run(processes, name, *data, *more, "--cache_dir", name)
        assert len(list(Path(name, "features").iterdir())) == 2
        assert numbers(name) == pytest.approx(numbers("plain"), rel=1e-5)


def plain_features() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The head of runs/source, and the features of small/train and of its mirror images."""
    model = timm.create_model("test_resnet", num_classes=3).eval()
    model.load_state_dict(weights("source", "best"))
    head, model.fc = model.fc, nn.Identity()
    paths = sorted(Path("small/train").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    images = torch.from_numpy((pixels / 255 - 0.4) / 0.5).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        return head, model(images), model(images.flip(3))


def cached_features() -> np.ndarray:
    """The features of small/train in the folder `cache`, [views, images, ...]."""
    arrays = map(np.load, Path("cache/features").iterdir())
    return {array.shape[1]: array for array in arrays}[48]


@pytest.mark.full
def test_the_recipe_views_the_centre_and_its_mirror_image_and_is_best_at_the_end():
    recipe = str(ROOT / "recipes/head.yaml")
    flags = words("--data small --init_from runs/source --model timm/test_resnet --mean 0.4")
    flags += words("--epochs 3 --report false --cache_dir cache --threads 1 --num_workers 0")
    log = train_run(2, "run", "--config", recipe, *flags)
    _, plain, mirrored = plain_features()
    views = torch.from_numpy(cached_features())
    in_order = [(view - plain).abs().amax(1) < 1e-4 for view in views]
    assert torch.equal(in_order[0], ~in_order[1]) and 8 < in_order[0].sum() < 40
    other = torch.where(in_order[0][:, None], views[1], views[0])
    torch.testing.assert_close(other, mirrored, rtol=1e-4, atol=1e-5)
    (evaluated,) = (record for record in log if record["kind"] == "eval")
    best = read_pointer(Path("runs/run/checkpoints"), "best")
    assert best.name == f"step-{evaluated['step']:08d}" and evaluated["epoch"] == 3


@pytest.mark.full
def test_features_are_those_of_plain_pytorch_and_so_is_the_first_update():
    """All training images are in one update of plain sgd, so that their order does not matter."""
    flags = words("--max_steps 1 --global_batch_size 48 --weight_decay 0 --momentum 0")
    train_run(1, "run", *SMALL, *flags, *words("--lr_schedule constant --cache_dir cache"))
    head, x, _ = plain_features()
    # of the loss by the logits
    error = head(x).detach().softmax(1) - torch.eye(3).repeat_interleave(16, 0)
    np.testing.assert_allclose(cached_features(), x[None], rtol=1e-4, atol=1e-5)
    found, expected = weights("run"), head.state_dict()
    for name, gradient in (("weight", error.T @ x), ("bias", error.sum(0))):
        weight = expected[name] - 0.05 / 48 * gradient
        torch.testing.assert_close(found[f"fc.{name}"], weight, rtol=1e-5, atol=1e-6)


def killed(processes: int, flags: list[str]) -> None:
    """Train in runs/run, and kill all ranks in the third epoch, after a save in the second."""
    launch = start_ranks(processes, slow_train, flags, 0.0, 8)
    until(lambda: len(list(Path().glob("held-*"))) == processes)
    until(Path("runs/run/checkpoints/step-00000006").is_dir)
    launch.kill(signal.SIGKILL)
    launch.finish()


@FULL
def test_a_killed_run_ends_with_the_same_bits():
    flags = [*SMALL, *VIEWS, *words("--max_steps 9 --cache_dir cache")]
    train_run(2, "whole", *flags)
    killed(2, flags)
    shutil.rmtree("cache")
    train_run(2, "run", *flags, "--resume", "auto")
    for file in FILES:
        assert same_tensors(weights("run", file=file), weights("whole", file=file))


@pytest.mark.full
def test_a_resumed_run_with_another_number_of_views_says_so():
    flags = [*SMALL, *words("--run_name run --resume auto --lr_schedule constant")]
    returned(1, train.main, [*flags, *VIEWS, "--max_steps", "3"])
    (outcome,) = run_ranks(1, train.main, [*flags, *words("--feature_views 2 --max_steps 6")])
    assert outcome.code == 0 and "augmented views: 2, computed in" in place(outcome), outcome.err
    assert "feature_views" in outcome.out
    (outcome,) = run_ranks(1, train.main, [*flags, "--max_steps", "9"])
    assert outcome.code == 0 and "augmented views: 2, found in" in place(outcome), outcome.err


@pytest.mark.full
def test_microbatches_give_the_same_files_on_any_number_of_processes():
    flags = [*PHOTOS, *words("--max_steps 9 --microbatches 4 --threads null")]
    for processes in (1, 3):
        train_run(processes, f"on-{processes}", *flags, "--cache_dir", f"cache-{processes}")
    killed(2, flags)
    train_run(3, "run", *flags, *words("--resume auto --cache_dir empty"))
    for file in FILES:
        ends = Path("runs").glob(f"*/checkpoints/step-00000009/{file}")
        hashes = [sha256_of(path) for path in ends]
        assert len(hashes) == 3 and len({*hashes}) == 1
    folders = [Path(f"cache-{n}/features").iterdir() for n in (1, 3)]
    one, three = ({path.name: path.read_bytes() for path in paths} for paths in folders)
    assert one == three


@pytest.mark.full
def test_the_checkpoint_is_a_whole_model_for_eval_predict_export_and_replay():
    train_run(1, "run", *SMALL, *VIEWS)
    averaged = [record for record in records("run", "eval") if record["weights"] == "ema"]
    best = max(averaged, key=lambda record: (record["accuracy"], -record["step"]))
    found = returned(2, evaluation.main, words("--ckpt runs/run --threads 1 --num_workers 0"))[0]
    assert found["count"] == 21 and found["accuracy"] == best["accuracy"]
    assert found["loss"] == pytest.approx(best["loss"], rel=1e-5)
    flags = words("--ckpt runs/run --num_workers 0 --out found.json small/val")
    returned(1, predict.main, flags)
    rows = json.loads(Path("found.json").read_text())
    hits = [Path(row["path"]).parent.name == row["predicted"] for row in rows]
    assert np.mean(hits) == best["accuracy"]
    returned(1, export.main, words("--ckpt runs/run --to timm --out exported"))
    exported = load_file("exported/model.safetensors")
    assert same_tensors(exported, weights("run", "best", "ema.safetensors"))
    (replayed,) = run_ranks(1, replay.main, words("--run runs/run --update 8 --cpu"))
    logged = {record["step"]: record["loss"] for record in records("run", "train")}
    assert f"update 8: loss {logged[8]}\n" in replayed.out, replayed.out


def place(outcome) -> str:
    """The line of the start table that says where the features come from."""
    assert outcome.code == 0, outcome.err
    return next(line for line in outcome.out.splitlines() if "features of each view" in line)


def started(*flags: str, processes: int = 1) -> str:
    """`place` of a run of one update."""
    flags = [*SMALL, *words("--max_steps 1 --cache_dir cache"), *flags]
    return place(run_ranks(processes, train.main, flags)[0])


@pytest.mark.full
def test_a_second_start_finds_the_features_if_nothing_they_depend_on_changed(
    monkeypatch,
):
    first = started(processes=2)
    assert "found" not in first and re.search(r" 0\.\d MB cached", first)
    tensors = load_file(find_checkpoint(Path("runs/source")) / "model.safetensors")
    # features do not depend on it
    save_file(tensors | {"fc.bias": tensors["fc.bias"] + 1}, "head.safetensors")
    given = words("--model timm/test_resnet --mean 0.4")
    for more in (words("--seed 5 --crop_padding 2"), [*given, "--init_from", "head.safetensors"]):
        line = started(*more)
        assert "centre, found in cache/features" in line and "computed" not in line, more
    name = next(name for name in tensors if "running_var" in name)
    save_file(tensors | {name: tensors[name] * 1.001}, "other.safetensors")
    for more in ([*given, "--init_from", "other.safetensors"], ["--mean", "0.5"]):
        assert "found" not in started(*more), more
    assert "augmented views: 2, computed in" in started("--feature_views", "2")
    for more in (["--seed", "5"], ["--crop_padding", "2"]):
        line = started("--feature_views", "2", *more)
        assert "augmented views: 2, computed in" in line and "centre, found in" in line
    monkeypatch.setitem(DECODERS, "JPEG decoder", "another")
    assert "found" not in started()


@pytest.mark.full
def test_a_damaged_file_is_computed_again():
    started()
    path = max(Path("cache/features").iterdir(), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 8
    for damaged in (whole[:-1], flipped):
        path.write_bytes(damaged)
        line = started(processes=2)
        assert "centre, computed in" in line and "centre, found in" in line
        assert path.read_bytes() == whole


def test_without_a_cache_the_fix_is_named():
    Path("cache").mkdir()
    Path("cache/features").write_text("a file")
    line = refused(train.main, *SMALL, "--cache_dir", "cache", processes=2)
    assert "cache/features: cannot be used as a cache (" in line and "--cache_dir" in line


@pytest.mark.full
def test_another_stem_with_the_same_tensors_has_other_features():
    config = TrainConfig(model="mobilenet_v3_small")
    torch.save(build_model(config, InputSpec(64, 64, 3, [], []), 3).state_dict(), "m.pth")
    flags = words("--image_size 64 --model mobilenet_v3_small --init_from m.pth")
    for stem in ("standard", "small"):
        assert "found" not in started(*flags, "--stem", stem)


@pytest.mark.full
def test_a_photograph_that_cannot_be_read_is_one_line_of_all_ranks():
    path = max(Path("photos/train").rglob("*.png"))  # the check decodes the first ones
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    path.write_bytes(data)
    line = refused(train.main, *PHOTOS, "--cache_dir", "cache", processes=3)
    assert f"{path}: not a readable image" in line
    assert not list(Path("cache").rglob("*.npy"))


@pytest.mark.full
def test_what_cannot_be_exact_on_features_is_refused():
    line = refused(train.main, *SMALL, "--cutmix", "0.5")
    assert "--mixup and --cutmix mix images" in line and "--feature_views 0" in line
    for repeats, views in (("2", []), ("3", ["--feature_views", "2"])):
        line = refused(train.main, *SMALL, "--repeats", repeats, *views)
        assert f"--repeats {repeats}: copies of an image would have equal cached features" in line
    flags = [flag for flag in SMALL if flag not in ("--freeze", "backbone")]
    for more, reason in (
        ("--freeze layer1", "the trained layers are in several modules"),
        ("--freeze backbone --model mnist_cnn --init_from null", "the input of fc2 is random in"),
    ):
        more = words(more)
        line = refused(train.main, *flags, *more, "--feature_views", "2", processes=2)
        assert f"--feature_views 2: features cannot be cached, because {reason}" in line
        train_run(1, f"without-{more[1]}", *flags, *more, "--max_steps", "1")


@FULL
def test_a_dry_run_computes_no_features_and_says_that_updates_of_the_run_are_faster():
    for more, faster in (([], 1), (["--feature_views", "0"], 0)):
        (outcome,) = run_ranks(1, train.main, [*SMALL, *more, "--dry_run"])
        assert outcome.code == 0 and not list(Path("home").rglob("features")), outcome.err
        assert outcome.out.count("caches the outputs of the frozen layers") == faster
        assert ("feature_views" in outcome.out) is bool(more)


@pytest.mark.parametrize(
    ("model", "size", "frozen", "part", "shape"),
    [
        ("resnet18", 32, "backbone", "fc", (512,)),
        ("mobilenet_v3_small", 64, "backbone", "classifier", (576,)),
        pytest.param("vgg11", 32, "features", "classifier", (25088,), marks=FULL),
        pytest.param("vit_b_32", 64, "backbone", "heads", (768,), marks=FULL),
        ("mlp", 8, "backbone", "output", (256,)),
    ],
)
def test_the_last_part_has_all_trained_parameters_and_computes_the_logits(
    model, size, frozen, part, shape
):
    spec = InputSpec(size, size, 3, [0.5] * 3, [0.5] * 3)
    module = build_model(TrainConfig(model=model), spec, 5)
    freeze(module, [frozen])
    before = copy.deepcopy(module.state_dict())
    found, reason = find_last_part(module, spec)
    assert same_tensors(module.state_dict(), before) and module.training
    assert (found, reason) == (module.get_submodule(part), "")
    features: list = []
    found.register_forward_pre_hook(lambda _, inputs: features.extend(inputs))
    logits = module.eval()(torch.rand(3, 3, size, size))
    assert features[0].shape == (3, *shape) and torch.equal(found(features[0]), logits)


def test_a_sample_that_is_drawn_again_takes_the_next_view(monkeypatch):
    """The features are the pixels themselves."""
    monkeypatch.setattr(first_batch, "_MOST", 4)
    augmentation = Augmentation(3, [ShiftAndFlip(2, True)])
    images, everything = ArrayDataset(pictures(10), np.arange(10), augmentation), np.arange(10)
    draws = [augmentation.draw(Microbatch(0, epoch, 0, everything)) for epoch in range(3)]
    views = [augmentation.apply(torch.from_numpy(images.rows), draw) for draw in draws]
    features = ArrayDataset(torch.cat(views).float().numpy(), images.labels, source=images)
    indices, occurrences = np.array([4, 9, 4, 0, 4]), np.array([0, 0, 1, 0, 2])
    for epoch, again in product(range(7), (None, occurrences)):
        batch = features.__getitems__(Microbatch(5, epoch, 0, indices, again))
        turns = epoch + (occurrences if again is not None else np.zeros(5, int))
        chosen = zip(turns % 3, indices, strict=True)
        expected = torch.stack([views[turn][index] for turn, index in chosen])
        assert torch.equal(batch.images, expected.float())
        assert batch.labels.tolist() == indices.tolist()
        assert torch.equal(first_batch.pixels_of(features, batch.microbatch), expected[:4])


@pytest.mark.full
@pytest.mark.parametrize("data", [SMALL, pytest.param(PHOTOS, marks=FULL)])
def test_the_first_batch_shows_the_images_of_the_features(data):
    for views in ("2", "0"):
        train_run(1, views, *data, "--max_steps", "1", "--feature_views", views)
    found, expected = (np.asarray(Image.open(f"runs/{run}/first_batch.png")) for run in "20")
    assert np.array_equal(found, expected) and found.size > 12 * 100 * 100 * 3


class Scaled(nn.Module):
    """A model that changes the output of its head; with a head of zeros, no value shows it."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Conv2d(3, 4, 8), nn.Linear(4, 2)
        nn.init.zeros_(self.fc.weight), nn.init.zeros_(self.fc.bias)

    def forward(self, images):
        return 5 * self.fc(self.body(images).flatten(1))


def test_a_part_whose_output_the_model_changes_is_not_trained_on_features():
    model = Scaled()
    model.body.requires_grad_(False)
    part, reason = find_last_part(model, InputSpec(8, 8, 3, [0.5] * 3, [0.5] * 3))
    assert part is None and reason == "the output of the model is not that of fc"
