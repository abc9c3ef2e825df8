"""Models by name: what they are fed, the shape that they give, their stems, heads and published weights."""

import math
import os
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, refused, train_run, weights, working_in
from torch import nn

import eval
import train
from utils.config.settings import TrainConfig
from utils.data.order import fold_in
from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.models.zoo import build_model, check_model, input_spec, torchvision_models

FAMILIES = [
    "mnist_cnn",
    "mlp",
    "fastnet",
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "swin_t",
    "squeezenet1_0",
    "shufflenet_v2_x0_5",
    "regnet_y_400mf",
    "timm/resnet10t",
    "timm/convnext_atto",
]
LARGE = ["convnext_tiny", "swin_t"]
HEAVY = ["vgg11", "alexnet", "vit_b_16"]  # tried once only


def spec_of(size, channels):
    return InputSpec(size, size, channels, [0.5] * channels, [0.5] * channels)


def build(name, spec, classes=7, load=True, **settings):
    return build_model(TrainConfig(model=name, **settings), spec, classes, load)


def logits_of(model, spec, count=2, seed=0):
    images = torch.randn(count, spec.channels, spec.height, spec.width, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model.eval()(images)


def check_training(model, spec):
    """A full and an empty batch go forward and backward, as ranks do."""
    model.train()
    for count in (4, 0):
        logits = model(torch.zeros(count, spec.channels, spec.height, spec.width))
        assert logits.shape == (count, 7)
        logits.sum().backward()
    assert all(torch.isfinite(value.float()).all() for value in model.state_dict().values())
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    "channels, name",
    [pytest.param(1, name, marks=pytest.mark.full) for name in FAMILIES]
    + [pytest.param(3, name, marks=[pytest.mark.full] * (name in LARGE)) for name in FAMILIES],
)
def test_small_images_go_through_every_family_and_so_does_an_empty_batch(name, channels):
    spec = spec_of(32, channels)
    model = build(name, spec)
    assert model.training
    assert logits_of(model, spec).shape == (2, 7) and logits_of(model, spec, 0).shape == (0, 7)
    if channels == 1:  # beyond its stem it is the same network
        check_training(model, spec)


@pytest.mark.full
@pytest.mark.parametrize("name, channels", zip(HEAVY, [1, 3, 1], strict=True))
def test_heavy_families_take_small_images_too(name, channels):
    spec = spec_of(32, channels)
    model = build(name, spec)
    assert logits_of(model, spec).shape == (2, 7) and logits_of(model, spec, 0).shape == (0, 7)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "mobilenet_v3_small",
        pytest.param("swin_t", marks=pytest.mark.full),
        "squeezenet1_0",
    ],
)
@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.full)])
def test_photographs_go_through_as_well(name, channels):
    spec = spec_of(224, channels)
    assert logits_of(build(name, spec), spec, 1).shape == (1, 7)


@pytest.mark.parametrize("height, width, channels", [(28, 28, 1), (32, 32, 3), (28, 40, 3), (64, 28, 1)])
def test_own_models_take_any_shape_from_their_least_size_on(height, width, channels):
    spec = InputSpec(height, width, channels, [0.5] * channels, [0.5] * channels)
    for name in ("mnist_cnn", "mlp", "fastnet"):
        assert logits_of(build(name, spec), spec).shape == (2, 7)


def test_the_networks_of_ours_compute_what_they_say():
    spec = spec_of(28, 1)
    cnn, mlp = build("mnist_cnn", spec).eval(), build("mlp", spec, model_args={"hidden": 33}).eval()
    images = torch.randn(3, 1, 28, 28)
    f = nn.functional
    x = f.relu(f.max_pool2d(f.conv2d(images, cnn.conv1.weight, cnn.conv1.bias), 2))
    x = f.relu(f.max_pool2d(f.conv2d(x, cnn.conv2.weight, cnn.conv2.bias), 2)).flatten(1)
    expected = f.relu(x @ cnn.fc1.weight.T + cnn.fc1.bias) @ cnn.fc2.weight.T + cnn.fc2.bias
    assert torch.allclose(cnn(images), expected, atol=1e-5)
    hidden = torch.relu(images.flatten(1) @ mlp.hidden.weight.T + mlp.hidden.bias)
    assert hidden.shape == (3, 33)
    assert torch.allclose(mlp(images), hidden @ mlp.output.weight.T + mlp.output.bias, atol=1e-5)
    assert (build("mnist_cnn", spec, model_args={"dropout": 0.1}).drop_units.p) == 0.1


# -- stems -----------------------------------------------------------------------------------------------------------


def test_the_stem_fits_small_images():
    model = build("resnet18", spec_of(32, 3))
    conv = model.conv1
    assert (conv.kernel_size, conv.stride, conv.padding, conv.bias) == ((3, 3), (1, 1), (1, 1), None)
    assert isinstance(model.maxpool, nn.Identity)
    shapes = []
    model.layer1.register_forward_hook(lambda module, given, output: shapes.append(output.shape))
    logits_of(model, spec_of(32, 3))
    assert shapes == [(2, 64, 32, 32)]
    densenet = build("densenet121", spec_of(32, 1))
    assert densenet.features.conv0.stride == (1, 1) and isinstance(densenet.features.pool0, nn.Identity)


def test_large_images_keep_the_stem_and_grey_ones_change_its_channels_only():
    plain = torchvision.models.resnet18().conv1
    for channels in (1, 3):
        model = build("resnet18", spec_of(224, channels))
        conv = model.conv1
        assert (conv.kernel_size, conv.stride, conv.padding) == (plain.kernel_size, plain.stride, plain.padding)
        assert (conv.in_channels, conv.out_channels, conv.bias) == (channels, 64, None)
        assert isinstance(model.maxpool, nn.MaxPool2d)
    squeeze = build("squeezenet1_0", spec_of(224, 1)).features[0]
    assert squeeze.bias is not None and squeeze.in_channels == 1 and squeeze.kernel_size == (7, 7)


@pytest.mark.full
def test_patch_stems_stay_and_vgg_has_nothing_to_change():
    assert build("convnext_tiny", spec_of(32, 3)).features[0][0].kernel_size == (4, 4)
    assert build("swin_t", spec_of(32, 1)).features[0][0].in_channels == 1
    model = build("shufflenet_v2_x0_5", spec_of(224, 3))
    torch.manual_seed(fold_in(0, "weights"))
    plain = torchvision.models.shufflenet_v2_x0_5(num_classes=7)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_the_standard_stem_is_torchvisions_own_network_on_images_of_any_size():
    for name in ("resnet18", "mobilenet_v3_small"):
        model = build(name, spec_of(32, 3), stem="standard")
        torch.manual_seed(fold_in(0, "weights"))
        plain = torchvision.models.get_model(name, num_classes=7)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in plain.state_dict().items())
        images = torch.randn(2, 3, 32, 32)
        assert torch.allclose(model.eval()(images), plain.eval()(images), atol=1e-5) and model.stem_change == ""
    grey = build("resnet18", spec_of(32, 1), stem="standard")
    assert (grey.conv1.in_channels, grey.conv1.stride) == (1, (2, 2)) and isinstance(grey.maxpool, nn.MaxPool2d)
    assert grey.stem_change == "stem with 1 input channel"


def test_the_small_stem_can_be_chosen_for_larger_images():
    small, auto = (build("resnet18", spec_of(side, 3), stem=stem) for side, stem in ((128, "small"), (32, "auto")))
    assert isinstance(small.maxpool, nn.Identity) and str(small) == str(auto)
    assert small.stem_change == auto.stem_change and "3x3, stride 1: slower; --stem standard" in auto.stem_change
    assert build("resnet18", spec_of(128, 3)).stem_change == ""


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"model": "mlp"}, "--stem small is for models of torchvision without --pretrained; leave it out"),
        ({"model": "timm/resnet10t"}, "--stem small is for models of torchvision"),
        ({"model": "resnet18", "pretrained": True}, "--stem small is for models of torchvision without --pretrained"),
        ({"model": "swin_t"}, "--stem small: swin_t has no stem that can be replaced; leave it out"),
        pytest.param(
            {"model": "vgg11"},
            "--stem small: vgg11 has no stem that can be replaced; leave it out",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_small_stem_that_cannot_be_made_is_refused(settings, text):
    config = TrainConfig(stem="small", **settings)
    with pytest.raises(UserError, match=text):  # even if the data chose the model, after `check_model`
        build_model(config, spec_of(32, 3), 7)


STEM_FLAGS = ["--model", "resnet18", "--data", "synthetic/2x32x40", "--channels", "3", "--global_batch_size", "18"]
STEM_FLAGS += ["--max_steps", "1", "--threads", "1"]


@pytest.mark.full
def test_the_start_table_and_the_checkpoint_say_which_stem_a_run_has():
    flags, start = STEM_FLAGS, {}
    for stem in ("auto", "standard"):
        (outcome,) = run_ranks(1, train.main, [*flags, "--stem", stem, "--run_name", stem])
        assert outcome.code == 0, outcome.err
        start[stem] = next(line for line in outcome.out.splitlines() if line.lstrip().startswith("model "))
    assert "images, small-image stem (3x3, stride 1: slower; --stem standard keeps torchvision's)" in start["auto"]
    assert start["standard"].rstrip().endswith("32x32 colour images")
    torchvision.models.resnet18(num_classes=2).load_state_dict(weights("standard"))
    with pytest.raises(RuntimeError, match=r"conv1\.weight"):
        torchvision.models.resnet18(num_classes=2).load_state_dict(weights("auto"))
    line = refused(train.main, "--stem", "small")  # the data chooses the model
    assert "--stem small: mnist_cnn is not a torchvision model; leave it out" in line
    line = refused(train.main, *flags, "--run_name", "standard", "--resume", "auto")
    assert "was trained with a --stem of standard, not auto; use the same settings" in line
    (result,) = returned(1, eval.main, ["--ckpt", "runs/standard"])
    assert result["accuracy"] == records("standard", "eval")[-1]["accuracy"]


# -- published weights -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A torch hub folder of the test's own, and no way into the network."""
    monkeypatch.setenv("TORCH_HOME", os.path.abspath("torch"))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    Path("torch/hub/checkpoints").mkdir(parents=True)
    return Path("torch/hub/checkpoints")


def publish(hub, name, **arguments):
    """Write random weights where torchvision looks for the published ones; returns their network."""
    weights = torchvision.models.get_model_weights(name).DEFAULT
    torch.manual_seed(1)
    model = torchvision.models.get_model(name, **arguments)
    torch.save(model.state_dict(), hub / weights.url.rsplit("/", 1)[1])
    return model


def fix_of(config, spec):
    """The fix in the error about weights that cannot be loaded."""
    with pytest.raises(UserError) as error:
        build_model(config, spec, 7)
    assert f"--pretrained: the weights of {config.model} cannot be loaded (" in error.value.problem
    return error.value.fix


@pytest.mark.parametrize(
    "name, head",
    [
        ("resnet18", "fc"),
        ("squeezenet1_0", "classifier.1"),
        ("mobilenet_v3_small", "classifier.3"),
        pytest.param("swin_t", "head", marks=pytest.mark.full),
    ],
)
def test_published_weights_are_loaded_under_a_new_head_and_evaluated_as_trained(hub, name, head):
    published = publish(hub, name)
    config = TrainConfig(model=name, pretrained=True)
    spec = input_spec(config, 1, (28, 28))
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    assert (spec.channels, spec.height, spec.width) == (3, preset.crop_size[0], preset.crop_size[0])
    assert (spec.mean, spec.std) == (preset.mean, preset.std)
    model = build_model(config, spec, 7)
    state, wanted = model.state_dict(), published.state_dict()
    kept = [key for key in state if not key.startswith(head + ".")]
    assert all(torch.equal(state[key], wanted[key]) for key in kept) and len(kept) > 20
    assert not any(torch.equal(state[key], wanted[key]) for key in state if key.startswith(head + "."))
    for empty in hub.iterdir():
        empty.unlink()
    again = build_model(config, spec, 7, load=False)  # as eval.py does: no weights, no download, the same network
    again.load_state_dict(state)
    small = InputSpec(96, 96, 3, spec.mean, spec.std)
    assert torch.equal(logits_of(model, small), logits_of(again, small))
    check_training(model, small)


def head_rows(settings, names, published):
    """A model for these classes with published weights, and the rows of the published head that it has."""
    config = TrainConfig(pretrained=True, **settings)
    spec = input_spec(config, 3, (32, 32))
    model = build_model(config, InputSpec(64, 64, 3, spec.mean, spec.std), len(names), True, names)
    own, whole = model.fc.weight, published.fc.weight
    equal = [[row for row, other in enumerate(whole) if torch.equal(one, other)] for one in own]
    return model, [rows[0] for rows in equal if rows]


def test_the_published_head_is_kept_for_classes_that_the_weights_know(hub):
    published = publish(hub, "resnet18")
    settings = {"model": "resnet18"}
    categories = torchvision.models.ResNet18_Weights.DEFAULT.meta["categories"]
    model, rows = head_rows(settings, ["goldfish", "tench", "toilet tissue"], published)
    assert rows == [categories.index(name) for name in ("goldfish", "tench", "toilet tissue")] == [1, 0, 999]
    assert torch.equal(model.fc.bias, published.fc.bias[rows])
    spec = InputSpec(96, 96, 3, [0.5] * 3, [0.5] * 3)
    torch.testing.assert_close(logits_of(model, spec), logits_of(published, spec)[:, rows])
    assert model.head_change == "head of the published weights for all 3 classes"
    assert head_rows(settings, ["n01443537", "n01440764"], published)[1] == [1, 0]  # WordNet ids
    model, rows = head_rows(settings, ["goldfish", "a fish of mine"], published)
    assert rows == [] and not hasattr(model, "head_change")


@pytest.mark.full
def test_a_run_with_published_weights_resumes_without_them_and_passes_its_stem_on(hub):
    publish(hub, "resnet18")
    flags = ["--image_size", "32", "--max_train_samples", "32", "--max_eval_samples", "8", "--global_batch_size", "16"]
    flags += ["--threads", "1", "--lr", "0.01", "--max_steps"]
    start = ["--run_name", "run", "--model", "resnet18", "--pretrained", "--resume", "auto", *flags]
    assert run_ranks(1, train.main, [*start, "1"])[0].code == 0
    for file in hub.iterdir():
        file.unlink()
    (outcome,) = run_ranks(1, train.main, [*start, "2"])
    assert outcome.code == 0, outcome.err
    (outcome,) = run_ranks(1, train.main, ["--init_from", "runs/run", *flags, "1"])
    assert ": 122 tensors kept; its model, stem, channels, mean, std" in outcome.out, outcome.out


def test_the_head_of_timms_weights_is_kept_too():
    torch.manual_seed(1)
    published = timm.create_model("resnet10t")
    torch.save(published.state_dict(), "weights.pt")
    settings = {"model": "timm/resnet10t", "model_args": {"pretrained_cfg_overlay": {"file": "weights.pt"}}}
    assert head_rows(settings, ["n15075141", "n01440764"], published)[1] == [999, 0]
    assert head_rows(settings, ["goldfish, Carassius auratus", "tench, Tinca tinca"], published)[1] == [1, 0]
    assert head_rows(settings, ["goldfish", "tench"], published)[1] == [1, 0]  # torchvision's names
    assert head_rows(settings, ["goldfish", "tench", "other"], published)[1] == []


def test_the_vision_transformer_takes_its_weights_at_their_size_only():
    problem = "--image_size 32: the weights of vit_b_16 are for 224x224 images only; leave out --image_size"
    with pytest.raises(ValueError, match=problem):
        input_spec(TrainConfig(model="vit_b_16", pretrained=True, image_size=32), 3, (32, 32))
    assert input_spec(TrainConfig(model="vit_b_16", pretrained=True), 3, (32, 32)).height == 224
    assert input_spec(TrainConfig(model="vit_b_16", image_size=32), 3, None).height == 32


def test_weights_that_are_missing_or_damaged_are_one_line_with_the_fix(hub):
    config = TrainConfig(model="resnet18", pretrained=True)
    spec = input_spec(config, 3, None)
    file = hub.resolve() / "resnet18-f37072fd.pth"
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    assert fix_of(config, spec) == f"without a network, save {url} as {file}"
    publish(hub, "resnet18")
    for content in (file.read_bytes()[:1000], b"nothing", b""):
        file.write_bytes(content)
        assert fix_of(config, spec) == f"delete {file} if it is damaged"
    publish(hub, "resnet18")
    config = TrainConfig(model="resnet18", pretrained=True, image_size=64, model_args={"groups": 1})
    assert build_model(config, spec, 7)
    wide = TrainConfig(model="resnet18", pretrained=True, model_args={"replace_stride_with_dilation": [True]})
    assert fix_of(wide, spec) == f"leave out --model_args, or delete {file} if it is damaged"
    config = TrainConfig(model="timm/resnet10t", pretrained=True)
    fix = fix_of(config, input_spec(config, 3, None))
    assert fix.startswith(
        "without a network, run `hf download timm/resnet10t.c3_in1k` elsewhere and copy the files to /"
    )


def test_grey_images_become_coloured_for_published_weights_unless_the_user_says_grey():
    config = TrainConfig(model="resnet18", pretrained=True)
    assert input_spec(config, 1, (28, 28)).channels == 3
    config = TrainConfig(model="resnet18", pretrained=True, channels=1)
    spec = input_spec(config, 1, (28, 28))
    assert spec.channels == 1 and spec.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
    with pytest.raises(ValueError, match="leave out --channels 1"):
        build_model(config, spec, 7)


def test_timm_models_take_grey_images_under_their_weights():
    name = "timm/resnet10t"
    torch.manual_seed(1)
    published = timm.create_model("resnet10t")
    torch.save(published.state_dict(), "weights.pt")
    overlay = {"pretrained_cfg_overlay": {"file": "weights.pt"}}
    config = TrainConfig(model=name, pretrained=True, channels=1, model_args=overlay)
    spec = input_spec(config, 1, (28, 28))
    cfg = timm.get_pretrained_cfg("resnet10t")
    assert (spec.height, spec.channels) == (cfg.input_size[1], 1) and spec.std == [sum(cfg.std) / 3]
    state = build_model(config, spec, 7).state_dict()
    assert torch.equal(state["layer1.0.conv1.weight"], published.state_dict()["layer1.0.conv1.weight"])
    stem = published.state_dict()["conv1.0.weight"].sum(1, keepdim=True)
    assert torch.allclose(state["conv1.0.weight"], stem) and state["fc.weight"].shape[0] == 7


# -- what the model is fed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, seen, shape",
    [
        ({"model": "mnist_cnn"}, (1, (28, 28)), (28, 28, 1)),
        ({"model": "mnist_cnn"}, (1, (8, 8)), (28, 28, 1)),
        ({"model": "mlp"}, (1, (8, 8)), (8, 8, 1)),
        ({"model": "resnet18"}, (3, (16, 40)), (32, 80, 3)),
        ({"model": "resnet18"}, (3, (96, 64)), (96, 64, 3)),
        ({"model": "resnet18"}, (3, (97, 64)), (224, 224, 3)),
        ({"model": "resnet18"}, (3, None), (224, 224, 3)),
        ({"model": "resnet18", "image_size": 64}, (3, None), (64, 64, 3)),
        ({"model": "resnet18", "channels": 1}, (3, (32, 32)), (32, 32, 1)),
        ({"model": "resnet18", "channels": 3}, (1, (32, 32)), (32, 32, 3)),
        ({"model": "resnet18", "pretrained": True, "image_size": 64}, (3, (32, 32)), (64, 64, 3)),
    ],
)
def test_the_input_follows_the_flags_then_the_weights_then_the_data(settings, seen, shape):
    spec = input_spec(TrainConfig(**settings), *seen)
    assert (spec.height, spec.width, spec.channels) == shape
    assert len(spec.mean) == len(spec.std) == spec.channels


def test_photographs_are_resized_for_evaluation_as_for_the_published_weights():
    for name in torchvision_models():
        preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        spec = input_spec(TrainConfig(model=name, pretrained=True), 3, None)
        found = spec.height, spec.resize, spec.interpolation, spec.squash
        assert found == (preset.crop_size[0], preset.resize_size[0], preset.interpolation.value, False), name
    for name in timm.list_models(pretrained=True)[::20]:
        cfg = timm.get_pretrained_cfg(name)
        for size in (cfg.input_size[1], 160, 320):
            spec = input_spec(TrainConfig(model=f"timm/{name}", pretrained=True, image_size=size), 3, None)
            assert spec.small or spec.resize == math.floor(size / cfg.crop_pct), name  # as in timm's own transform
            assert spec.small or (spec.interpolation, spec.squash) == (cfg.interpolation, cfg.crop_mode == "squash")


def test_the_share_of_a_photograph_follows_the_flag_then_the_weights_and_images_up_to_96_pixels_have_none():
    def resize(**settings):
        return input_spec(TrainConfig(**{"model": "resnet50", **settings}), 3, None).resize

    assert (resize(), resize(image_size=320), resize(eval_crop=1.0), resize(eval_crop=0.5)) == (256, 365, 224, 448)
    assert (resize(pretrained=True), resize(pretrained=True, image_size=448)) == (232, 464)
    assert resize(pretrained=True, eval_crop=0.9) == 248
    for pretrained in (True, False):
        small = input_spec(TrainConfig(model="swin_t", pretrained=pretrained, image_size=96, eval_crop=0.5), 3, None)
        assert (small.resize, small.interpolation, small.squash) == (None, "bilinear", False)
    assert input_spec(TrainConfig(model="swin_t"), 3, None).interpolation == "bilinear"


def test_means_and_deviations_are_given_for_each_channel_or_for_all():
    spec = input_spec(TrainConfig(mean=[0.1, 0.2, 0.3], std=[0.4]), 3, (32, 32))
    assert (spec.mean, spec.std) == ([0.1, 0.2, 0.3], [pytest.approx(0.4)] * 3)
    assert input_spec(TrainConfig(), 3, (32, 32)).mean == [0.5] * 3
    given = TrainConfig(model="resnet18", pretrained=True, mean=[0.1], std=[1.0, 2.0, 3.0])
    assert input_spec(given, 3, None).mean == [pytest.approx(0.1)] * 3
    assert input_spec(given, 3, None).std == [1.0, 2.0, 3.0]
    for flag in ("mean", "std"):
        with pytest.raises(ValueError, match=f"--{flag} has 3 values for 1 channels; give one value"):
            input_spec(TrainConfig(**{flag: [0.1, 0.2, 0.3]}), 1, (28, 28))


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"model": "resnet81"}, "--model resnet81: no such model; did you mean .*resnet18"),
        ({"model": "vit"}, r"no such model; did you mean vit_b_16, vit_b_32, vit_h_14 or vit_l_16\?$"),
        ({"model": "ResNet18"}, r"no such model; did you mean resnet18\?$"),
        ({"model": "vgg11-bn"}, r"no such model; did you mean vgg11_bn\?$"),
        ({"model": "shuffle"}, "did you mean shufflenet_v2_x0_5, "),
        ({"model": "resnet10t"}, r"--model resnet10t: no such model; did you mean timm/resnet10t\?$"),
        ({"model": ""}, "--model : no such model; use mnist_cnn, mlp"),
        ({"model": "timm/"}, "--model timm/: timm has no such model; use mnist_cnn, mlp"),
        (
            {"model": "timm/resnet18.a2"},
            "--model timm/resnet18.a2: timm has no such weights; did you mean timm/resnet18.a",
        ),
        (
            {"model": "resnet18", "model_args": {"weights": "x"}},
            "--model_args weights: cannot be set here; leave it out",
        ),
        (
            {"model": "timm/resnet10t", "model_args": {"pretrained": True}},
            "--model_args pretrained: cannot be set here",
        ),
        ({"model": "xyzzy"}, "--model xyzzy: no such model; use .*, fastnet, any torchvision .* or timm/NAME$"),
        ({"model": "timm/resnet81"}, "--model timm/resnet81: timm has no such model; did you mean timm/resnet"),
        ({"model": "mnist_cnn", "pretrained": True}, "--pretrained: mnist_cnn has no published weights"),
    ],
)
def test_models_that_do_not_exist_are_refused_with_the_nearest_name(settings, text):
    with pytest.raises(ValueError, match=text):
        check_model(TrainConfig(**settings))


def test_models_of_timm_without_weights_cannot_start_from_them():
    bare = next(name for name in timm.list_models() if not timm.is_model_pretrained(name))
    check_model(TrainConfig(model=f"timm/{bare}"))
    with pytest.raises(ValueError, match=f"--pretrained: timm has no weights for {bare}"):
        check_model(TrainConfig(model=f"timm/{bare}", pretrained=True))


@pytest.mark.parametrize("name", ["mnist_cnn", "mlp", "resnet18", "timm/resnet10t"])
def test_a_wrong_model_argument_is_named(name):
    with pytest.raises(ValueError, match=f"--model_args for {name}: .*'colour'"):
        build(name, spec_of(32, 3), model_args={"colour": 1})


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("timm/resnet10t", {"act_layer": "x"}, "KeyError 'x'; change or remove these arguments"),
        (
            "timm/resnet10t",
            {"features_only": True},
            "has an output of type list, not one score per class; leave out --model_args",
        ),
        (
            "timm/resnet10t",
            {"drop_rate": "x"},
            "does not accept 32x32x3 images .*; change --model_args, or try --image_size",
        ),
        ("mnist_cnn", {"dropout": 2}, "--model_args for mnist_cnn: dropout probability has to be between 0 and 1"),
        ("resnet18", {"replace_stride_with_dilation": [1]}, "--model_args for resnet18: replace_stride_with_dilation"),
        ("resnet18", {"norm_layer": "x"}, "--model_args for resnet18: 'str' object is not callable"),
    ],
)
def test_values_of_model_arguments_that_no_model_takes_are_one_line(name, arguments, text):
    with pytest.raises(UserError, match=text):
        build(name, spec_of(32, 3), model_args=arguments)


def test_models_with_several_heads_are_refused():
    with pytest.raises(ValueError, match="--model inception_v3: no such model; did you mean timm/inception_v3"):
        build("inception_v3", spec_of(128, 3))


@pytest.mark.parametrize(
    "name, size, fix",
    [
        ("mnist_cnn", 8, 28),
        pytest.param("maxvit_t", 32, 224, marks=pytest.mark.full),
        ("timm/vit_tiny_patch16_384", 32, 384),
    ],
)
def test_images_that_do_not_fit_are_refused_with_a_size_that_does(name, size, fix):
    with pytest.raises(ValueError, match=rf"{name} does not accept {size}x{size}x3 images .*; try --image_size {fix}$"):
        build(name, spec_of(size, 3))
    config = TrainConfig(model=name, image_size=fix)
    spec = input_spec(config, 3, (size, size))
    build_model(config, spec, 7)


SMALL_SWIN = {"img_size": 28, "patch_size": 2, "window_size": 7, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
SMALL_SWIN |= {"drop_path_rate": 0.0}
NO_EMPTY = "timm/swin_tiny_patch4_window7_224"


def test_a_model_that_cannot_take_an_empty_batch_computes_an_image_of_zeros_without_effect():
    model = build(NO_EMPTY, spec_of(28, 3), model_args=SMALL_SWIN)
    model.layers[1].eval()  # as of a frozen layer
    modes = [module.training for module in model.modules()]
    logits = model(torch.zeros(0, 3, 28, 28))
    assert logits.shape == (0, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes

    plain = timm.create_model(NO_EMPTY[5:], num_classes=7, in_chans=3, **SMALL_SWIN).eval()
    with pytest.raises(RuntimeError):
        plain(torch.zeros(0, 3, 28, 28))
    fresh = build(NO_EMPTY, spec_of(28, 3), model_args=SMALL_SWIN)
    plain.load_state_dict(fresh.state_dict())
    images = torch.randn(3, 3, 28, 28)
    assert torch.equal(plain(images), fresh.eval()(images))


def test_batch_statistics_do_not_change_with_an_empty_batch_that_the_model_itself_refuses():
    model = build("timm/edgenext_xx_small", spec_of(64, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.zeros(0, 3, 64, 64)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and model.training


def test_a_model_that_cannot_take_an_empty_batch_is_refused_with_shared_batch_statistics():
    with pytest.raises(ValueError, match=r"does not accept an empty batch.*use another model"):
        build(NO_EMPTY, spec_of(28, 3), model_args=SMALL_SWIN, sync_batchnorm=True)


def test_a_rank_without_samples_trains_a_model_that_cannot_take_an_empty_batch(tmp_path):
    flags = ["--data", "digits", "--model", NO_EMPTY, "--model_args", str(SMALL_SWIN), "--image_size", "28"]
    flags += ["--max_train_samples", "21", "--global_batch_size", "20", "--max_steps", "4", "--log_every", "1"]
    flags += [
        "--max_eval_samples",
        "10",
        "--threads",
        "1",
        "--optimizer",
        "adamw",
        "--lr",
        "0.001",
        "--drop_last",
        "false",
    ]
    with working_in(tmp_path):
        train_run(1, "one", *flags)
        train_run(2, "two", *flags)
        found = {name: [record["loss"] for record in records(name, "train")] for name in ("one", "two")}
    assert len(found["one"]) == 4 and found["two"] == pytest.approx(found["one"], rel=1e-5)


def test_a_model_that_gives_no_scores_is_refused():
    with pytest.raises(ValueError, match=r"has an output of shape \[1, 512, 7, 7\], not one score per class"):
        build("timm/resnet10t", spec_of(224, 3), model_args={"num_classes": 0, "global_pool": ""})
