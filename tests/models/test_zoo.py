"""utils/models/zoo.py: models by name, their input and shape, stems, heads, published weights."""

import math

import pytest
import timm
import torch
import torchvision
from helpers.published import HUB, publish, use_own_caches
from helpers.training_runs import same_tensors
from torch import nn

from utils.data.order import fold_in
from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.models.layers import freeze
from utils.models.zoo import OWN_MODELS, build_model, check_model, input_spec, torchvision_models
from utils.settings.train import TrainConfig

FAMILIES = ["mnist_cnn", "mlp", "fastnet", "resnet18", "mobilenet_v3_small", "squeezenet1_0"]
FULL = "shufflenet_v2_x0_5 densenet121 efficientnet_b0 convnext_tiny swin_t regnet_y_400mf"
FULL += " googlenet timm/resnet10t timm/convnext_atto vgg11 alexnet vit_b_16"


def spec_of(size, channels):
    return InputSpec(size, size, channels, [0.5] * channels, [0.5] * channels)


def build(name, spec, classes=7, weight_bytes=None, **settings):
    return build_model(TrainConfig(model=name, **settings), spec, classes, weight_bytes)


def logits_of(model, spec, count=2):
    images = torch.randn(
        count, spec.channels, *spec.size, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return model.eval()(images)


def check_training(model, spec):
    """A full and an empty batch go forward and backward, as ranks do."""
    model.train()
    for count in (4, 0):
        outputs = model(torch.zeros(count, spec.channels, *spec.size))
        heads = outputs if isinstance(outputs, tuple) else [outputs]
        assert {logits.shape for logits in heads} == {(count, 7)}
        sum(logits.sum() for logits in heads).backward()
    assert all(torch.isfinite(value.float()).all() for value in model.state_dict().values())
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize("channels", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in FULL.split())]
)
def test_small_images_go_through_every_family_and_so_does_an_empty_batch(name, channels):
    spec = spec_of(32, channels)
    model = build(name, spec)
    assert model.training
    assert logits_of(model, spec).shape == (2, 7) and logits_of(model, spec, 0).shape == (0, 7)
    if channels == 1:  # beyond its stem it is the same network
        check_training(model, spec)


# -- stems


@pytest.mark.full
def test_the_stem_fits_small_images_and_the_small_one_can_be_chosen_for_larger_ones():
    model = build("resnet18", spec_of(32, 3))
    small = build("resnet18", spec_of(128, 3), stem="small")
    conv = model.conv1
    assert (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1))
    assert conv.bias is None and str(small) == str(model) and isinstance(model.maxpool, nn.Identity)
    assert "3x3, stride 1: slower; --stem standard" in model.stem_change == small.stem_change
    features = build("densenet121", spec_of(32, 1)).features
    assert features.conv0.stride == (1, 1) and isinstance(features.pool0, nn.Identity)


def test_the_standard_stem_is_torchvisions_own_network_on_images_of_any_size():
    model = build("resnet18", spec_of(32, 3), stem="standard")
    torch.manual_seed(fold_in(0, "weights"))
    plain = torchvision.models.get_model("resnet18", num_classes=7)
    assert same_tensors(model.state_dict(), plain.state_dict()) and model.stem_change == ""
    torch.testing.assert_close(logits_of(model, spec_of(32, 3)), logits_of(plain, spec_of(32, 3)))
    grey = build("resnet18", spec_of(32, 1), stem="standard")
    assert (grey.conv1.in_channels, grey.conv1.stride) == (1, (2, 2))
    assert grey.stem_change == "stem with 1 input channel"
    assert build("resnet18", spec_of(128, 3)).stem_change == ""


# -- published weights


@pytest.fixture
def hub(monkeypatch):
    use_own_caches(monkeypatch)
    return HUB


def fix_of(config, spec):
    """The fix in the error about weights that cannot be loaded."""
    with pytest.raises(UserError) as error:
        build_model(config, spec, 7)
    assert f"--pretrained: the weights of {config.model} cannot be loaded (" in error.value.problem
    return error.value.fix


@pytest.mark.full
@pytest.mark.parametrize(
    "name, head",
    [
        ("resnet18", "fc"),
        pytest.param("squeezenet1_0", "classifier.1", marks=pytest.mark.full),
        pytest.param("swin_t", "head", marks=pytest.mark.full),
    ],
)
def test_published_weights_are_loaded_under_a_new_head_and_evaluated_as_trained(hub, name, head):
    wanted = publish(name).state_dict()
    config = TrainConfig(model=name, pretrained=True)
    spec = input_spec(config, 1, (28, 28))
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    assert (spec.channels, spec.height, spec.width) == (3, preset.crop_size[0], preset.crop_size[0])
    assert (spec.mean, spec.std) == (preset.mean, preset.std)
    model = build_model(config, spec, 7)
    state = model.state_dict()
    new = {key for key in state if not torch.equal(state[key], wanted[key])}
    assert new == {f"{head}.weight", f"{head}.bias"} and not any(state[key].any() for key in new)
    for empty in hub.iterdir():
        empty.unlink()
    # as eval.py does: no weights, no download, the same network
    again = build_model(config, spec, 7, math.inf)
    again.load_state_dict(state)
    small = InputSpec(96, 96, 3, spec.mean, spec.std)
    assert torch.equal(logits_of(model, small), logits_of(again, small))
    check_training(model, small)


def head_rows(settings, names, published):
    """A model for these classes with published weights, and the rows of the published head that it
    has.
    """
    config = TrainConfig(pretrained=True, **settings)
    spec = input_spec(config, 3, (32, 32))
    model = build_model(config, InputSpec(64, 64, 3, spec.mean, spec.std), len(names), None, names)
    equal = (model.fc.weight[:, None] == published.fc.weight).all(2)
    return model, equal.nonzero()[:, 1].tolist()


@pytest.mark.full
def test_the_published_head_is_kept_for_classes_that_the_weights_know(hub):
    published = publish("resnet18")
    settings = {"model": "resnet18"}
    model, rows = head_rows(settings, ["goldfish", "tench", "toilet tissue"], published)
    assert rows == [1, 0, 999] and torch.equal(model.fc.bias, published.fc.bias[rows])
    spec = spec_of(96, 3)
    torch.testing.assert_close(logits_of(model, spec), logits_of(published, spec)[:, rows])
    assert model.head_change == "head of the published weights for all 3 classes"
    assert head_rows(settings, ["n01443537", "n01440764"], published)[1] == [1, 0]
    model, rows = head_rows(settings, ["goldfish", "a fish of mine"], published)
    assert rows == [] and not hasattr(model, "head_change")


@pytest.mark.full
def test_weights_that_are_missing_or_damaged_are_one_line_with_the_fix(hub):
    config = TrainConfig(model="resnet18", pretrained=True)
    spec = input_spec(config, 3, None)
    file = hub.resolve() / "resnet18-f37072fd.pth"
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    fix = f"without a network, or if the file is damaged, save {url} as {file}"
    assert fix_of(config, spec) == fix
    publish("resnet18")
    for content in (file.read_bytes()[:1000], b"nothing", b""):
        file.write_bytes(content)
        assert fix_of(config, spec) == fix
    config = TrainConfig(model="timm/resnet10t", pretrained=True)
    fix = fix_of(config, input_spec(config, 3, None))
    assert fix.startswith("without a network, run `hf download timm/resnet10t.c3_in1k` elsewhere")


def test_grey_images_become_coloured_for_published_weights_unless_the_user_says_grey():
    assert input_spec(TrainConfig(model="resnet18", pretrained=True), 1, (28, 28)).channels == 3
    config = TrainConfig(model="resnet18", pretrained=True, channels=1)
    spec = input_spec(config, 1, (28, 28))
    assert spec.channels == 1 and spec.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
    with pytest.raises(ValueError, match="leave out --channels 1"):
        build_model(config, spec, 7)


@pytest.mark.full
def test_timm_models_take_grey_images_and_keep_the_head_under_their_weights():
    torch.manual_seed(1)
    published = timm.create_model("resnet10t")
    torch.save(published.state_dict(), "weights.pt")
    settings = {
        "model": "timm/resnet10t",
        "model_args": {"pretrained_cfg_overlay": {"file": "weights.pt"}},
    }
    config = TrainConfig(pretrained=True, channels=1, **settings)
    spec = input_spec(config, 1, (28, 28))
    cfg = timm.get_pretrained_cfg("resnet10t")
    assert (spec.height, spec.channels, spec.std) == (cfg.input_size[1], 1, [sum(cfg.std) / 3])
    model = build_model(config, spec, 7)
    assert torch.equal(model.layer1[0].conv1.weight, published.layer1[0].conv1.weight)
    summed = published.conv1[0].weight.sum(1, keepdim=True)
    torch.testing.assert_close(model.conv1[0].weight, summed)
    for names, rows in (
        (["n15075141", "n01440764"], [999, 0]),
        (["goldfish, Carassius auratus", "tench, Tinca tinca"], [1, 0]),
        (["goldfish", "tench"], [1, 0]),  # torchvision's names
        (["goldfish", "tench", "other"], []),
    ):
        assert head_rows(settings, names, published)[1] == rows


# -- what the model is fed


@pytest.mark.parametrize(
    "settings, seen, shape",
    [
        ({"model": "mnist_cnn"}, (1, (8, 8)), (28, 28, 1)),
        ({"model": "resnet18"}, (3, (16, 40)), (32, 80, 3)),
        ({"model": "resnet18"}, (3, (97, 64)), (224, 224, 3)),
        ({"model": "resnet18", "image_size": 64, "channels": 3}, (1, None), (64, 64, 3)),
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
        sizes = [*preset.crop_size, *preset.resize_size]
        assert [spec.height, spec.resize] == sizes and not spec.squash, name
        assert spec.interpolation == preset.interpolation.value, name
    for name in timm.list_models(pretrained=True)[::50]:
        cfg = timm.get_pretrained_cfg(name)
        config = TrainConfig(model=f"timm/{name}", pretrained=True, image_size=320)
        spec = input_spec(config, 3, None)
        assert spec.resize == math.floor(320 / cfg.crop_pct), name
        found = spec.interpolation, spec.squash
        assert found == (cfg.interpolation, cfg.crop_mode == "squash"), name


def test_means_and_deviations_are_given_for_each_channel_or_for_all():
    for pretrained in (False, True):
        given = {"mean": [0.1, 0.2, 0.3], "std": [0.4]}
        config = TrainConfig(model="resnet18", pretrained=pretrained, **given)
        spec = input_spec(config, 3, (32, 32))
        assert (spec.mean, spec.std) == ([0.1, 0.2, 0.3], [pytest.approx(0.4)] * 3)
    with pytest.raises(ValueError, match="--mean has 3 values for 1 channels; give one value"):
        input_spec(TrainConfig(mean=[0.1, 0.2, 0.3]), 1, (28, 28))


# -- errors


RESNET = {"model": "timm/resnet10t"}
SMALL_SWIN = {"img_size": 28, "patch_size": 2, "window_size": 7, "embed_dim": 16}
SMALL_SWIN |= {"depths": [1, 1], "num_heads": [2, 2], "drop_path_rate": 0.0}
NO_EMPTY = "timm/swin_tiny_patch4_window7_224"


@pytest.mark.full
@pytest.mark.parametrize(
    "settings, text",
    [
        ({"model": "resnet81"}, "--model resnet81: no such model; did you mean .*resnet18"),
        ({"model": "ResNet18"}, r"no such model; did you mean resnet18\?$"),
        ({"model": "resnet10t"}, r"no such model; did you mean timm/resnet10t\?$"),
        ({"model": "xyzzy"}, "no such model; use .*, fastnet, any torchvision .* or timm/NAME$"),
        ({"model": "timm/resnet18.a2", "pretrained": True}, "resnet18.a2 has no published weights"),
        ({"model": "mnist_cnn", "pretrained": True}, "mnist_cnn has no published weights"),
        ({"model": "resnet18", "model_args": {"weights": "x"}}, "weights: cannot be set here"),
        (
            {"model": "resnet18", "model_args": {"colour": 1}},
            "--model_args for resnet18: .*'colour'",
        ),
        (RESNET | {"model_args": {"act_layer": "x"}}, "KeyError: 'x'; change or remove these"),
        (
            RESNET | {"model_args": {"features_only": True}},
            r"returns \[1, .* for 1 images, not one score",
        ),
        (RESNET | {"model_args": {"drop_rate": "x"}}, "does not accept 32x32x3 images"),
        (
            {"model": "inception_v3", "image_size": 224},
            "not accept 224x224.*; try --image_size 299",
        ),
        ({"model": "mnist_cnn", "image_size": 8}, "8x8x3 images .*; try --image_size 28,"),
        ({"model": "mlp", "stem": "small"}, "--stem small: only for models of torchvision"),
        ({"model": "swin_t", "stem": "small"}, "--stem small: swin_t has no stem that can be"),
        ({"model": "mlp", "drop_path": 0.1}, "--drop_path: mlp does not support it; use a timm"),
        (
            {"model": NO_EMPTY, "model_args": SMALL_SWIN, "image_size": 28, "sync_batchnorm": True},
            "does not accept an empty batch",
        ),
    ],
)
def test_models_and_arguments_that_do_not_work_are_refused_with_a_fix(settings, text):
    config = TrainConfig(**settings)
    with pytest.raises(UserError, match=text):
        check_model(config)
        build_model(config, input_spec(config, 3, (32, 32)), 7)


def test_a_model_that_refuses_an_empty_batch_computes_zeros_without_effect():
    model = build(NO_EMPTY, spec_of(28, 3), model_args=SMALL_SWIN)
    freeze(model, ["layers.1"])
    modes = [module.training for module in model.modules()]
    logits = model(torch.zeros(0, 3, 28, 28))
    assert logits.shape == (0, 7)
    logits.sum().backward()
    trained = [each.grad for each in model.parameters() if each.requires_grad]
    assert trained and all(grad is not None and not grad.any() for grad in trained)
    assert [module.training for module in model.modules()] == modes
    plain = timm.create_model(NO_EMPTY[5:], num_classes=7, in_chans=3, **SMALL_SWIN).eval()
    with pytest.raises(RuntimeError):
        plain(torch.zeros(0, 3, 28, 28))
    plain.load_state_dict(model.state_dict())
    # some processors round differently where a tensor lies elsewhere in memory
    torch.testing.assert_close(logits_of(plain, spec_of(28, 3)), logits_of(model, spec_of(28, 3)))

    batch_norm = build("resnet18", spec_of(64, 3))
    before = {name: value.clone() for name, value in batch_norm.state_dict().items()}
    batch_norm(torch.zeros(0, 3, 64, 64)).sum().backward()
    assert same_tensors(batch_norm.state_dict(), before) and batch_norm.training


def test_a_model_of_a_plug_in_gets_the_training_images_before_weights_are_loaded(monkeypatch):
    class Own(nn.Sequential):
        """Counts the images."""

        def __init__(self, spec, classes):
            super().__init__(nn.Flatten(), nn.Linear(spec.height * spec.width, classes))

        def initialise(self, images):
            nn.init.constant_(self[1].bias, len(images))

    monkeypatch.setitem(OWN_MODELS, "own", Own)
    config = TrainConfig(model="own")
    model = build_model(config, spec_of(8, 1), 3, images=range(50))
    assert model[1].bias.tolist() == [50] * 3
    assert build_model(config, spec_of(8, 1), 3)[1].bias.tolist() != [50] * 3
