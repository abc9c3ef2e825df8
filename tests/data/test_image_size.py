"""--image_size and --eval_size may differ, and need not be square."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from helpers.make_data import image_folder, smooth
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, same_tensors, train_run, weights, words
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms import v2

import eval
import train
from utils.config.cli import parse_args
from utils.data.decode import center
from utils.data.selection import load_data
from utils.data.spec import InputSpec
from utils.models.zoo import build_model, input_spec
from utils.runs.manifest import find_checkpoint
from utils.runs.metadata import read_checkpoint
from utils.settings.train import TrainConfig, to_yaml
from utils.training.defaults import Facts, hint_for_few, without_effect

FLAGS = words(
    "--data pictures --eval_fraction 0.5 --model resnet18 --stem standard --threads 1 "
    "--max_steps 1 --global_batch_size 4 --num_workers 0 --min_scale 1"
)


def plain_loss(name):
    """The loss of a run's weights in torchvision's own network, on evaluation images that are that
    large already.
    """
    config = TrainConfig(data="pictures", eval_fraction=0.5)
    split = load_data(config).evaluation
    images = [np.asarray(Image.open(split.describe(position))) for position in range(len(split))]
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    model = torchvision.models.resnet18(num_classes=2).eval()
    model.load_state_dict(weights(name))
    with torch.no_grad():
        return F.cross_entropy(model((x - 0.5) / 0.5), torch.from_numpy(split.labels)).item()


@pytest.mark.full
def test_runs_and_eval_py_evaluate_images_of_the_evaluation_size():
    image_folder("pictures", {"cat": 6, "dog": 6}, size=(64, 80))
    flags = FLAGS + words("--image_size 32 48")
    (outcome,) = run_ranks(1, train.main, ["--run_name", "run", *flags, "--eval_size", "[64, 80]"])
    assert "32x48 colour images, evaluated at 64x80\n" in outcome.out
    expected = pytest.approx(plain_loss("run"), rel=1e-5)
    assert records("run", "eval")[-1]["loss"] == expected
    train_run(1, "usual", *flags)
    assert abs(records("usual", "eval")[-1]["loss"] - records("run", "eval")[-1]["loss"]) > 1e-3
    assert same_tensors(weights("usual"), weights("run"))
    for given in ("runs/run", "runs/usual --eval_size 64 80"):
        results = returned(2, eval.main, words(f"--ckpt {given}"))
        assert [result["loss"] for result in results] == [expected] * 2


@pytest.mark.full
def test_a_run_of_small_images_can_be_evaluated_on_photographs_and_resumed():
    image_folder("pictures", {"cat": 6, "dog": 6}, size=(128, 160))
    # The stem follows from the size of training, in eval.py too.
    flags = FLAGS + words("--stem auto --image_size 32 --eval_size 112 140 --eval_crop 0.875")
    (outcome,) = run_ranks(1, train.main, ["--run_name", "run", *flags])
    assert "evaluation: decoded for each batch" in outcome.out
    assert "no effect" not in outcome.out
    saved = read_checkpoint(find_checkpoint(Path("runs/run")))
    large = saved.spec.for_evaluation()
    assert saved.spec.small and not large.small
    assert (large.size, large.resize) == ((112, 140), 128)
    train_run(1, "run", *flags, "--resume", "auto", "--max_steps", "2")
    (result,) = returned(1, eval.main, ["--ckpt", "runs/run/checkpoints/step-00000002"])
    assert result["loss"] == pytest.approx(records("run", "eval")[-1]["loss"], rel=1e-6)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(
    ("size", "whole"), [((112, 140), (256, 320)), ((140, 112), (320, 256)), ((112, 196), (64, 112))]
)
def test_the_centre_of_a_photograph_fills_a_rectangle(size, whole, squash):
    spec = InputSpec(*size, 3, [0.5] * 3, [0.5] * 3, squash=squash).cropped(0.875)
    assert spec.resize == 128
    same_shape = [side * 128 // 112 for side in size]
    square = same_shape if squash else [max(same_shape)] * 2
    for shape, sides in (
        (whole, same_shape),
        ((300, 300), square),
        ((30, 30), square),
    ):
        pixels = torch.from_numpy(smooth(*shape))
        resized = v2.functional.resize(pixels.permute(2, 0, 1), sides, antialias=True)
        expected = v2.functional.center_crop(resized, list(size))
        assert torch.equal(center(pixels, spec), expected.permute(1, 2, 0))
        share = math.prod(size) / math.prod(sides)  # of the whole image
        assert spec.visible_share(shape[0] / shape[1]) == pytest.approx(share, rel=0.01)


def test_the_resizing_of_evaluation_is_that_of_its_own_size():
    settings = {"model": "timm/vit_tiny_patch16_224", "pretrained": True, "image_size": 64}
    config = TrainConfig(**settings, eval_size=[160, 224])
    spec = input_spec(config, 3, None)
    assert (spec.size, spec.resize, spec.interpolation) == ((64, 64), None, "bilinear")
    other = spec.for_evaluation()
    assert (other.size, other.resize, other.interpolation) == ((160, 224), 177, "bicubic")
    assert other.mean == spec.mean
    for size in (None, [64, 64]):
        assert input_spec(replace(config, eval_size=size), 3, None).evaluation is None


def test_the_input_of_a_checkpoint_has_one_of_evaluation_or_none():
    spec = InputSpec(32, 48, 3, [0.5] * 3, [0.5] * 3)
    both = replace(spec, evaluation=replace(spec, height=64))
    assert InputSpec.from_dict(asdict(both)) == both
    assert InputSpec.from_dict(asdict(spec)) == spec == spec.for_evaluation()
    for wrong in ({}, asdict(spec) | {"channels": 1}):
        with pytest.raises(ValueError, match="is missing or malformed"):
            InputSpec.from_dict(asdict(spec) | {"evaluation": wrong})


LEAVE_OUT = "images .*; leave out --eval_size"
VIT = "timm/vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        ("mlp", {"eval_size": [28, 30]}, f"mlp does not accept 28x30x3 {LEAVE_OUT}"),
        (VIT, {"image_size": 224, "eval_size": 256}, f"256x256x3 {LEAVE_OUT}"),
        (VIT, {"image_size": [224, 256]}, "224x256x3 images .*; try --image_size 224"),
        ("vit_b_16", {"pretrained": True, "image_size": 64}, "image_size.* expected value 224"),
    ],
)
def test_a_model_that_does_not_take_the_size_is_refused_with_the_fix(model, settings, text):
    config = TrainConfig(model=model, **settings)
    with pytest.raises(ValueError, match=text):
        build_model(config, input_spec(config, 3, (28, 28)), 2)


@pytest.mark.parametrize(
    "given, expected", [("64", 64), ("64 80", [64, 80]), ("[64,80]", [64, 80])]
)
def test_a_size_is_one_number_or_two_and_survives_saving(given, expected, capsys):
    config = parse_args(TrainConfig, "train.py", ["--eval_size", *words(given)])
    assert config.eval_size == expected
    Path("saved.yaml").write_text(to_yaml(config))
    assert parse_args(TrainConfig, "train.py", ["--config", "saved.yaml"]) == config
    for size in ("[64, 65, 66]", "[64, 0]"):
        with pytest.raises(SystemExit):
            parse_args(TrainConfig, "train.py", ["--eval_size", size])
        assert "--eval_size must be " in capsys.readouterr().err


def test_few_photographs_and_a_new_model_are_a_line_about_pretrained():
    config = TrainConfig(model="resnet18")
    assert "--pretrained is usually far more accurate" in hint_for_few(config, 999)[0]
    assert hint_for_few(config, 1000) == hint_for_few(replace(config, freeze=["backbone"]), 9) == []
    assert hint_for_few(replace(config, pretrained=True), 9) == []


@pytest.mark.parametrize(
    ("small", "expected"),
    [
        ((True, True), ["num_workers", "eval_crop"]),
        ((True, False), []),
        ((False, True), ["eval_crop"]),
    ],
)
def test_only_settings_without_effect_at_either_size_are_reported(small, expected):
    settings = {"num_workers": 1, "data_on_device": "yes", "eval_crop": 0.9}
    training, evaluation = small
    facts = Facts(
        processes=2,
        small=training,
        small_evaluation=evaluation,
        by_loader=False,
        has_columns=False,
    )
    text = " ".join(without_effect(TrainConfig(model="resnet18", **settings), facts))
    assert [name for name in settings if name in text] == expected
