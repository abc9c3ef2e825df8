"""--init_from FILE, and eval.py --model NAME --weights FILE."""

import argparse
import io
import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from helpers.make_data import image_folder
from helpers.ranks import returned, run_ranks
from helpers.training_runs import refused, same_tensors, weights, words
from PIL import Image
from torch import nn
from torch.nn import functional as F

import eval
import train
from utils.config.yaml_text import read_yaml
from utils.errors import UserError
from utils.models.matching import fit_names
from utils.models.published import CLASSES
from utils.models.weight_files import read_any
from utils.runs.foreign import InitialWeights, classes_of_outputs
from utils.runs.init_from import copy_source
from utils.settings.train import TrainConfig

# its published weights are for 160x160 pixels, bilinear, mean and std 0.5
MODEL = "timm/test_resnet"
NAMES = ["cat", "dog", "emu"]
OWN = [f"class {number}" for number in range(1000)]


def model_of(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=outputs)
    for name, tensor in model.state_dict().items():  # other values than in a new layer
        if name.endswith(("running_mean", "running_var", "bn1.bias")):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def expected(model: nn.Module, paths: list[Path]) -> torch.Tensor:
    """Logits of timm's model for images that need no resizing."""
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        return model(images)


def test_weights_of_a_file_give_the_results_of_plain_timm():
    model = model_of()
    own = prefixed("module.", model.state_dict()) | {"criterion.weight": torch.ones(3)}
    content = {"epoch": 3, "state_dict": {}, "state_dict_ema": own}
    torch.save(content | {"args": argparse.Namespace(lr=0.1)}, "W.pth")
    paths = image_folder("data/val", dict.fromkeys(NAMES, 3), size=(160, 160))
    logits, labels = expected(model, paths), torch.arange(3).repeat_interleave(3)
    line = [*FILE, *words("--eval_crop 1 --num_workers 0")]
    for processes in (1, 2):
        record = returned(processes, eval.main, [*line, "--predictions", "out.json"])[0]
        assert (record["count"], record["classes"], record["model"]) == (9, 3, MODEL)
        assert record["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        rows = json.loads(Path("out.json").read_text())
        for row, probabilities in zip(rows, logits.softmax(1), strict=True):
            found = {row[f"class_{place}"]: row[f"probability_{place}"] for place in (1, 2, 3)}
            expected_row = pytest.approx(probabilities.tolist(), abs=1e-5)
            assert [found[name] for name in NAMES] == expected_row


def in_order(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under other names, in the same order."""
    return {f"layer{number}": tensor for number, tensor in enumerate(state.values())}


def settings_of(*flags: str, source: str = "W.pth") -> dict:
    """config.yaml of a run of one update from these weights."""
    image_folder("photos/train", dict.fromkeys(NAMES, 4), size=(110, 120), kind="jpg")
    line = words("--data photos --max_steps 1 --global_batch_size 4 --run_name run --num_workers 0")
    returned(1, train.main, [*line, "--report", "false", "--init_from", source, *flags])
    return read_yaml(Path("runs/run/config.yaml"))


@pytest.mark.full
def test_a_run_from_a_file_has_the_input_of_the_published_weights_and_says_so():
    model = timm.create_model("resnet10t", num_classes=7)
    torch.save(in_order(model.state_dict()), "W.pth")
    found = settings_of("--model", "timm/resnet10t", "--init_match", "order")
    cfg = timm.get_pretrained_cfg("resnet10t")
    assert (found["mean"], found["std"]) == ([*cfg.mean], [*cfg.std]) and cfg.mean[0] == 0.485
    assert (found["image_size"], found["eval_crop"]) == ([176, 176], cfg.crop_pct)
    assert (found["interpolation"], found["channels"]) == ("bicubic", 3)
    state = weights("run")
    assert state.keys() == model.state_dict().keys() and state["fc.weight"].shape[0] == 3
    lines = Path("runs/run/init_from.txt").read_text().splitlines()
    assert "kept conv1.0.weight" in lines
    assert "new fc.weight: shape [3, 512], in the source [7, 512]" in lines


ONE = torch.ones(1)


def prefixed(
    prefix: str, state: dict[str, torch.Tensor], scale: int = 1
) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor * scale for name, tensor in state.items()}


FOREIGN = {  # what files of other trainers hold, and how many names are left out
    "ddp and compile": lambda s: (prefixed("module._orig_mod.", s), 0),
    "simsiam": lambda s: ({**prefixed("module.encoder.", s), "module.predictor.0.bias": ONE}, 1),
    "simclr": lambda s: ({"state_dict": {**prefixed("backbone.", s), "projector.bias": ONE}}, 1),
    "dino": lambda s: ({"student": prefixed("", s, 0), "teacher": prefixed("backbone.", s)}, 0),
}


@pytest.mark.full
@pytest.mark.parametrize("form", FOREIGN)
def test_the_model_is_found_among_other_tensors_of_a_file_and_these_are_named(form):
    state = {name: t for name, t in model_of().state_dict().items() if not name.startswith("fc.")}
    content, others = FOREIGN[form](state)
    torch.save(content, "W.pth")
    tensors, _ = read_any(Path("W.pth"))
    found, left_out = fit_names(tensors, model_of(), "W.pth", MODEL)
    assert same_tensors(found, state)
    assert len(left_out) == others and not state.keys() & {*left_out}
    if form == "simclr":
        settings_of("--model", MODEL)
        lines = Path("runs/run/init_from.txt").read_text().splitlines()
        assert "not used: projector.bias" in lines


def test_a_prefix_that_the_model_has_itself_stays():
    model = torchvision.models.vit_b_32(num_classes=2)  # with encoder.layers and encoder.ln
    own = model.state_dict()
    for prefix in ("", "module.", "encoder."):
        found, left_out = fit_names(prefixed(prefix, own), model, "W.pth", "vit_b_32")
        assert list(found) == list(own) and not left_out


def test_a_prefix_that_fits_less_than_half_of_the_names_stays():
    own = model_of().state_dict()
    first, *others = own
    tensors = {f"module.{first}": own[first], **prefixed("module.other.", own)}
    assert len(others) > 2
    found, left_out = fit_names(tensors, model_of(), "W.pth", MODEL)
    assert found.keys() == tensors.keys() and not left_out


def test_other_prefixes_are_named_in_the_error():
    torch.save(prefixed("model.", model_of().state_dict()), "W.pth")
    image_folder("data/val", dict.fromkeys(NAMES, 1), size=(160, 160))
    for folder in ("train", "val"):
        image_folder(f"photos/{folder}", dict.fromkeys(NAMES, 2), size=(110, 120), kind="jpg")
    line = words(f"--data photos --model {MODEL} --init_from W.pth --threads 1")
    assert "none of its tensors (model.conv1.0.weight, " in refused(train.main, *line)
    assert "W.pth: has no head for timm/test_resnet" in refused(eval.main, *FILE)


def test_names_of_the_authors_of_swin_are_converted_by_timm():
    """In their code, a stage ends with its downsampling; in timm, the next one begins with it."""
    sizes = {"img_size": 64, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2, 2)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_heads=(1, 2), **sizes)
    own, theirs = model.state_dict(), {}
    for name, tensor in own.items():
        name = name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc", "head")
        theirs[name] = tensor.clone()
    theirs["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16).long()
    found, _ = fit_names(theirs, model, "W.pth", "timm/swin")
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


FILE = words(f"--model {MODEL} --weights W.pth --data data")


@pytest.mark.parametrize(
    ("script", "flags", "text"),
    [
        (eval, "--weights x.pth", "--weights x.pth needs --model"),
        (eval, "--ckpt run --mean 0.5", "--ckpt and --mean cannot be used together"),
        (eval, "--model resnet18 --weights ema --data d", "--model needs weights"),
    ],
)
def test_each_wrong_flag_for_a_file_ends_in_an_error_that_names_the_right_one(script, flags, text):
    assert re.search(text, refused(script.main, *words(flags)))


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def bomb() -> bytes:
    """A file of torch.save with a compressed tensor of zeros."""
    made, packed = io.BytesIO(), io.BytesIO()
    torch.save({"fc.weight": torch.zeros(2_000_000)}, made)
    with (
        zipfile.ZipFile(made) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    return packed.getvalue()


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def contains_itself() -> dict:
    inside: dict = {}
    inside["model"] = inside
    return inside


STATE = {"fc.weight": torch.ones(2, 3)}
PLAIN = "is not a plain dense tensor"
HOSTILE = {
    "code": (pickle.dumps(Harmful(), 2), "loading getattr in it would execute code"),
    "code in an archive": (saved({"state_dict": STATE, "hook": Harmful()}), "would execute code"),
    "zip bomb": (bomb(), r"it is larger when unpacked \(8,0\d\d,\d{3} bytes\)"),
    "truncated": (saved(STATE)[:-200], "cannot be read"),
    "truncated.safetensors": (b"\x50" + bytes(7) + b'{"fc.weight":', "is not a safetensors file"),
    "not a state dict": (saved([1, 2]), "has no state dict with tensors"),
    "contains itself": (saved(contains_itself()), "has no state dict with tensors"),
    "sparse": (saved({"a": torch.eye(3).to_sparse()}), PLAIN),
    "larger than its storage": (saved({"a": torch.ones(1).expand(10**6)}), PLAIN),
    "page": (b"<!DOCTYPE html>" * 10, "is not a file of torch.save; give another file"),
    "without memory": (saved({"a": torch.zeros(3, device="meta")}), PLAIN),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malicious_or_malformed_file_ends_with_one_line_and_executes_nothing(name):
    content, text = HOSTILE[name]
    Path(name).write_bytes(content)
    with pytest.raises(UserError, match=text) as caught:
        read_any(Path(name))
    assert "\n" not in str(caught.value) and not Path("executed").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("fc.weight"), "has no head for timm/test_resnet"),
        (lambda state: state.update({"layer9.weight": torch.ones(2)}), "different model (layer9.w"),
        (lambda state: state.pop("conv1.0.weight"), "different model (conv1.0.weight: nothing in"),
        (lambda state: state.update({"fc.bias": torch.zeros(3).long()}), "[3] of integers in"),
        (lambda state: state["fc.bias"].fill_(float("nan")), "are NaN or infinite (fc.bias)"),
        (
            lambda state: state.update({"fc.weight": torch.ones(4, 96)}),
            "have 4 classes, and --data",
        ),
        (None, "its tensors do not have the shapes of timm/test_resnet in the same order"),
    ],
)
def test_weights_that_do_not_fit_are_not_evaluated(change, text):
    state = model_of().state_dict()
    if change:
        change(state)
    else:
        state = dict(reversed(state.items()))
    torch.save(state, "W.pth")
    image_folder("data/val", dict.fromkeys(NAMES, 1), size=(160, 160))
    assert text in refused(eval.main, *FILE, *([] if change else ["--init_match", "order"]))


@pytest.mark.full
def test_a_file_with_a_thousand_outputs_has_the_classes_of_imagenet():
    torch.save(model_of(1000).state_dict(), "W.pth")
    image_folder("data/val", {"tabby": 1, "tench": 1}, size=(160, 160))
    (outcome,) = run_ranks(1, eval.main, FILE)
    assert "classes of the outputs, in order: tench, goldfish, great white shark" in outcome.out
    image_folder("other/val", {"cat": 1, "dog": 1}, size=(160, 160))
    problem = "the class 'cat' of --data is not a class of ImageNet"
    assert problem in refused(eval.main, *FILE[:-1], "other")
    image_folder("own/val", {f"{number:03}": 1 for number in range(1000)}, size=(8, 8))
    (outcome,) = run_ranks(1, eval.main, [*FILE[:-1], "own"])
    assert outcome.code == 0, outcome.err
    assert "classes of the outputs, in order: 000, 001, 002" in outcome.out


def test_the_classes_of_a_file_follow_from_its_outputs_and_the_names_of_the_data():
    assert classes_of_outputs(1000, ["tench", "tabby"]) == CLASSES
    assert classes_of_outputs(1000, sorted(CLASSES)) == CLASSES
    assert classes_of_outputs(1000, OWN) == OWN and classes_of_outputs(3, NAMES) == NAMES
    with pytest.raises(UserError, match="the class 'cat' of --data is not a class of ImageNet"):
        classes_of_outputs(1000, NAMES)
    with pytest.raises(UserError, match="the weights have 21,841 classes, and --data has 3"):
        classes_of_outputs(21841, NAMES)


@pytest.mark.parametrize(
    ("names", "outputs"), [(sorted(CLASSES), CLASSES), (OWN, OWN)], ids=["imagenet", "own"]
)
def test_a_head_with_a_thousand_rows_goes_to_the_classes_of_imagenet_by_their_names(names, outputs):
    tensors = model_of(1000).state_dict()
    source = InitialWeights("W.pth", tensors, [], {})
    model = model_of(1000)
    copy_source(model, source, names, TrainConfig(model=MODEL))
    rows = [outputs.index(name) for name in names]
    for name in ("fc.weight", "fc.bias"):
        assert torch.equal(model.state_dict()[name], tensors[name][rows])
    assert f"outputs for classes, in order: {', '.join(outputs[:6])}" in source.describe()


@pytest.mark.full
def test_the_rate_of_the_model_alone_is_that_of_all_ranks():
    torch.save(model_of().state_dict(), "W.pth")
    image_folder("data/val", dict.fromkeys(NAMES, 1), size=(160, 160))
    outcomes = run_ranks(2, eval.main, [*FILE, *words("--throughput --eval_batch_size 4")])
    rate = outcomes[0].value["model_images_per_second"]
    assert rate == outcomes[1].value["model_images_per_second"] > 0
    assert re.search(rf"model alone +{rate:,.1f} images/s", outcomes[0].out)


@pytest.mark.full
def test_a_head_without_names_goes_to_the_classes_in_the_order_of_the_data():
    torch.save(state := model_of(12).state_dict(), "W.pth")
    numbers = [str(number) for number in range(1, 13)]
    image_folder("photos/train", dict.fromkeys(numbers, 2), size=(110, 120), kind="jpg")
    line = words(f"--data photos --init_from W.pth --model {MODEL} --max_steps 1 --lr 1e-9")
    line += words("--global_batch_size 4 --run_name run --num_workers 0 --report false")
    (outcome,) = run_ranks(1, train.main, line)
    assert outcome.code == 0, outcome.err
    assert "outputs for classes, in order: 1, 10, 11, 12, 2, 3, ... (12 in all)" in outcome.out
    assert torch.allclose(weights("run")["fc.bias"], state["fc.bias"], atol=1e-6)
    (outcome,) = run_ranks(1, eval.main, [*FILE, *words("--num_workers 0 --data photos")])
    assert "classes of the outputs, in order: 1, 10, 11" in outcome.out
