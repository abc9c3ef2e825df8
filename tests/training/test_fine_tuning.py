"""--init_from and --freeze: other weights, frozen layers, stochastic depth, checkpointing."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.make_data import image_folder
from helpers.published import COMMIT, cache_repository, use_own_caches
from helpers.ranks import ALONE, run_ranks, start_ranks
from helpers.training_runs import (
    records,
    refused,
    rewrite_manifest,
    same_tensors,
    slow_train,
    train_run,
    weights,
    words,
    working_in,
)
from helpers.waiting import until
from safetensors.torch import load_file, save_file
from torch import nn

import train
from utils.config.cli import parse_args
from utils.data.spec import InputSpec
from utils.errors import UserError
from utils.models.layers import checkpoint_blocks, find_heads, freeze, has_batch_norm
from utils.models.matching import copy_matching
from utils.models.zoo import build_model
from utils.runs.init_from import copy_source, load_initial_weights
from utils.runs.manifest import read_pointer
from utils.settings.train import TrainConfig

RESNET, VIT = "timm/test_resnet", "timm/vit_tiny_patch16_224"
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
SMALL_VIT |= {"drop_rate": 0.2}


def build(name, classes=5, size=32, seed=0, **settings):
    spec = InputSpec(size, size, 3, [0.5] * 3, [0.5] * 3)
    torch.manual_seed(seed)
    return build_model(TrainConfig(model=name, **settings), spec, classes)


# -- which tensors are copied


def two_layers(classes, inputs=3):
    return nn.Sequential(nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def test_the_rows_of_the_head_follow_the_names_of_the_classes():
    source, model = two_layers(4), two_layers(3)
    there = source.state_dict()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = there | {"extra": torch.zeros(1)}
    found = copy_matching(model, tensors, ["a", "b", "c", "c"], ["b", "new", "a"])
    state = model.state_dict()
    for name in ("2.weight", "2.bias"):
        assert torch.equal(state[name], torch.stack([there[name][1], own[name][1], there[name][0]]))
    others = [name for name in own if not name.startswith("2.")]
    assert all(torch.equal(state[name], there[name]) for name in others) and found.kept == others
    new = "new: 2.weight, 2.bias (2 of 3 classes kept)"
    assert found.line() == f"{len(others)} tensors kept, {new}, not used: extra"
    assert found.text().splitlines()[-3:] == [
        "new 2.weight: except for the rows of 2 of 3 classes",
        "new 2.bias: except for the rows of 2 of 3 classes",
        "not used: extra",
    ]


def test_a_class_name_twice_is_unknown_and_a_head_without_names_is_kept():
    source, model = two_layers(3, inputs=5), two_layers(3)
    for names, order, rows in (
        (["a", "b", "c"], [2, 0, 1], (3, 3)),
        (["a", "a", "x"], [2, 0, 1], (0, 3)),
        ([], [0, 1, 2], None),
    ):
        found = copy_matching(model, source.state_dict(), names, ["c", "a", "b"])
        # the second keeps what the first has copied
        assert torch.equal(model[2].weight, source[2].weight[order]) and found.rows == rows
        assert found.new["0.weight"] == "shape [4, 3], in the source [4, 5]"


def test_the_head_is_the_one_that_timm_names_or_the_last_linear_layer():
    heads = {"mnist_cnn": "fc2", "mobilenet_v3_small": "classifier.3", RESNET: "fc"}
    heads["squeezenet1_0"] = "classifier.1"
    assert {name: find_heads(build(name)) for name in heads} == {
        name: (head,) for name, head in heads.items()
    }


# -- where weights come from

TINY = words("--model timm/test_resnet --threads 1 --global_batch_size 16 --lr_schedule constant")
# the weights stay as they are
STILL = [*TINY, *words("--lr 1e-30 --weight_decay 0 --max_steps 1 --fit_head false")]
TUNED = [*STILL[2:], "--data", "second"]
SOURCE = ("--init_from", "runs/source")


def trained(name: str, *flags: str, processes: int = 1) -> str:
    """Train a run; returns what its main process prints."""
    outcomes = run_ranks(processes, train.main, ["--run_name", name, *flags])
    assert all(outcome.code == 0 for outcome in outcomes), outcomes[0].err
    return outcomes[0].out


def initial(**settings) -> tuple:
    return load_initial_weights(TrainConfig(**settings), None, ALONE)


def input_of(run):
    """The height and the mean in the last checkpoint of a run."""
    path = sorted(Path("runs", run, "checkpoints").glob("step-*/state.json"))[-1]
    state = json.loads(path.read_text())
    return state["input"]["height"], state["input"]["mean"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the data sets `first` and `second`, and a run on the first, runs/source."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    with working_in(folder):
        for seed, (data, classes) in enumerate((("first", "abc"), ("second", "bcz"))):
            image_folder(f"{data}/train", dict.fromkeys(classes, 16), seed=2 * seed)
            image_folder(f"{data}/val", dict.fromkeys(classes, 4), seed=2 * seed + 1)
        flags = words("--data first --mean 0.4 --std 0.3 --lr 0.01 --eval_every 1")
        train_run(1, "source", *TINY, *flags, "--max_steps", "4", "--image_size", "40")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    """The folder of `made`, as the working directory."""
    monkeypatch.chdir(made)
    return made


def test_a_run_starts_from_the_best_weights_of_another_on_any_number_of_processes(folder):
    out = trained("tuned", *TUNED, *SOURCE, processes=2)
    there, tuned = weights("source", "best"), weights("tuned")
    ends = ("weight", "bias")
    expected = {name: there[name] for name in there if name.endswith(ends) and "fc" not in name}
    for name in ("fc.weight", "fc.bias"):  # classes a, b, c there and b, c, z here
        expected[name] = torch.stack([*there[name][1:], torch.zeros_like(there[name][0])])
    assert len(expected) > 20
    for name, tensor in expected.items():  # an update adds about 1e-30 where a weight is 0
        torch.testing.assert_close(tuned[name], tensor, rtol=0, atol=1e-20)
    best = read_pointer(folder / "runs/source/checkpoints", "best")
    assert Path("runs/tuned/init_from.txt").read_text().splitlines()[0] == str(best)
    kept = f"{best}: {len(there) - 2} tensors kept, new: fc.weight, fc.bias (2 of 3 classes kept)"
    line = re.escape(f"{kept}; its model, channels, image_size, mean, std, interpolation")
    assert re.search(f"^init_from +{line}$", out, re.M)
    assert input_of("tuned") == (40, [0.4] * 3)


@pytest.mark.full
def test_the_head_learns_faster_and_batch_statistics_are_kept(folder):
    trained("still", *TUNED, *SOURCE)
    trained("gentle", *TINY[2:], *words("--data second --max_steps 1 --fit_head false"), *SOURCE)
    before, after, lr = weights("still"), weights("gentle"), records("gentle", "train")[0]["lr"]
    assert lr == pytest.approx(1e-4 * math.sqrt(16 / 128))
    names = ("fc.bias", "bn1.bias")
    moved = [(after[name] - before[name]).abs().max().item() for name in names]
    assert moved == pytest.approx([10 * lr, lr], rel=0.01)  # the size of the first step of Adam
    given = weights("source", "best")
    kept = [torch.equal(after[name], given[name]) for name in before if "running" in name]
    assert kept and all(kept)


@pytest.mark.full
def test_batch_statistics_that_were_not_given_cannot_be_kept(folder):
    tensors = weights("source", "best").items()
    given = {name: each for name, each in tensors if not name.startswith("layer1.0.bn1.")}
    save_file(given, "part.safetensors")
    flags = [*TINY[:2], *words("--data second --init_from part.safetensors --max_steps 1")]
    line = refused(train.main, *flags)
    assert "--keep_batch_stats: the given weights have no layer1.0.bn1.running_mean" in line
    trained("part", *flags, *words("--keep_batch_stats false --report false"))


def test_given_settings_take_precedence_over_those_of_the_source(folder):
    given = {"mean": [0.1], "image_size": 64, "channels": 1}
    filled, source = initial(init_from="runs/source", **given)
    assert filled.init_from == str(Path("runs/source").absolute())
    assert {name: getattr(filled, name) for name in given} == given and filled.model == RESNET
    assert filled.std == [pytest.approx(0.3)] and source.taken == ["model", "std", "interpolation"]
    other, _ = initial(init_from="runs/source", model="resnet18")
    assert other.model == "resnet18" and other.model_args == {}


@pytest.mark.full
def test_a_resumed_run_needs_no_source_and_keeps_what_it_took_from_it(folder):
    flags = [*TUNED, *words("--init_from gone --resume auto --max_steps")]
    (folder / "gone").symlink_to(folder / "runs/source")
    trained("moved", *flags, "1")
    (folder / "gone").unlink()
    out = trained("moved", *flags, "2", *SOURCE)
    assert "--init_from has no effect: a resumed run has the weights of its checkpoint" in out
    assert f"init_from: {folder / 'gone'}\n" in Path("runs/moved/config.yaml").read_text()
    assert input_of("moved") == (40, [0.4] * 3)


def test_averaged_weights_take_precedence(folder):
    shutil.copytree(read_pointer(folder / "runs/source/checkpoints", "best"), "averaged")
    raw = load_file("averaged/model.safetensors")
    average = {name: tensor + 1 for name, tensor in raw.items()}
    save_file(average, "averaged/ema.safetensors")
    rewrite_manifest(Path("averaged"))
    for where, tensors in (("averaged", average), ("averaged/model.safetensors", raw)):
        assert same_tensors(initial(init_from=where, model=RESNET)[1].tensors, tensors)


def test_a_repository_of_the_hub_is_read_with_its_classes_and_its_commit(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    use_own_caches(monkeypatch)
    published = build(RESNET, 2, seed=1, channels_last=False)
    snapshot = cache_repository("owner/name", published)
    for where in ("hf://owner/name", f"hf://owner/name@{COMMIT}"):
        config, source = initial(init_from=where, model=RESNET)
        assert source.name == f"hf://owner/name@{COMMIT}" and source.class_names == []
        assert (config.mean, config.image_size) == ([0.5] * 3, [160, 160])
    cfg = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "input_size": [3, 48, 40]}
    cfg |= {"crop_pct": 0.75, "interpolation": "bicubic", "crop_mode": "squash"}
    about = {"label_names": ["z", "a"], "architecture": "test_resnet", "pretrained_cfg": cfg}
    (snapshot / "config.json").write_text(json.dumps(about))
    config, source = initial(init_from="hf://owner/name")
    assert source.class_names == ["z", "a"] and config.model == RESNET
    assert (config.mean, config.image_size) == ([0.1, 0.2, 0.3], [48, 40])
    assert (config.eval_crop, config.interpolation, config.squash) == (0.75, "bicubic", True)
    model = build(RESNET, 2)
    copy_source(model, source, ["a", "z"], TrainConfig(model=RESNET))
    assert torch.equal(model.fc.weight, published.fc.weight[[1, 0]])
    with pytest.raises(UserError, match=r"safetensors of owner/other cannot be downloaded"):
        initial(init_from="hf://owner/other")


@pytest.mark.full
def test_sources_that_do_not_fit_are_one_line(folder):
    Path("odd").mkdir()
    save_file({"fc.weight": torch.ones(1)}, "odd/model.safetensors")
    Path("odd/config.json").write_text(json.dumps({"pretrained_cfg": {"mean": ["a", "b", "c"]}}))
    for where, line in (
        ("runs/nothing", "--init_from runs/nothing: no such file or folder"),
        ("first", "first: holds no checkpoint"),
        ("odd", "config.json: malformed (could not convert string to float: 'a')"),
        ("runs/source --pretrained", "--pretrained and --init_from cannot be used together"),
        ("runs/source --model mlp", "fits mlp, which has hidden.weight, hidden.bias"),
    ):
        assert line in refused(train.main, *words(f"--data first --threads 1 --init_from {where}"))


@pytest.mark.full
def test_a_new_layer_that_would_be_frozen_with_random_weights_is_refused(folder):
    save_file(weights("source", "best"), "colour.safetensors")
    flags = ["--data", "first", *STILL, *words("--init_from colour.safetensors --run_name frozen")]
    for patterns in (["backbone"], ["layer1", "conv*"]):
        line = refused(train.main, *flags, "--channels", "1", "--freeze", *patterns, processes=2)
        assert f"--freeze {patterns[-1]}: conv1.0.weight would stay random (shape [" in line
    train_run(1, "frozen", *flags, "--channels", "3", "--freeze", *patterns)


# -- frozen layers


def test_patterns_name_layers_or_parameters():
    for flags in (["a", "b*"], ["a", "--freeze=b*"], ["[a, b*]"]):
        config = parse_args(TrainConfig, "train.py", ["--freeze", *flags, "--cpu"])
        assert config.freeze == ["a", "b*"]
    names = [name for name, _ in build(RESNET).named_parameters()]
    for patterns, expected in (
        (["layer[12]", "bn1.bias"], lambda name: name.startswith(("layer1.", "layer2.", "bn1.b"))),
        (["*.bias"], lambda name: name.endswith(".bias")),
        (["backbone"], lambda name: not name.startswith("fc.")),
    ):
        model = build(RESNET)
        freeze(model, patterns)
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
        assert frozen == [*filter(expected, names)] != []
    assert not has_batch_norm(model)  # of the linear probe
    with pytest.raises(UserError, match=r"--freeze layer9: no parameter has such a name; did you"):
        freeze(model, ["conv1", "layer9"])
    with pytest.raises(UserError, match=r"--freeze hidden output: no parameter is left to train"):
        freeze(build("mlp"), ["hidden", "output"])


def test_batch_statistics_are_frozen_exactly_where_all_parameters_are():
    model = build(RESNET)
    freeze(model, ["layer1", "layer2.0.bn1.weight"])
    for step in range(2):  # also after an evaluation
        model.eval()
        model.train()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step)))
        same = {name for name, buffer in model.named_buffers() if torch.equal(buffer, before[name])}
        assert same == {name for name in before if name.startswith("layer1.")} != set()
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False))
    plain = nn.Sequential(inner, nn.Conv2d(3, 3, 1))
    freeze(plain, ["0.0"])
    plain.train()
    assert not plain[0][1].training and not has_batch_norm(plain)
    dropping = build("mnist_cnn")
    freeze(dropping, ["backbone"])
    assert dropping.drop_units.training


def test_frozen_layers_compute_as_in_evaluation():
    model = build(VIT, drop_path=0.5, model_args={**SMALL_VIT, "proj_drop_rate": 0.5})
    freeze(model, ["blocks.[01]"])
    inputs, expected = torch.randn(4, 17, 32), []
    for training in (False, True):
        model.train(training)
        expected.append([block(inputs) for block in model.blocks])
    same = [torch.equal(*pair) for pair in zip(*expected, strict=True)]
    assert same == [True, True, False, False]


ALL_ON = words("--data first --microbatches 4 --optimizer muon --lr 0.01 --lr_schedule constant")
ALL_ON += words("--model timm/test_resnet --global_batch_size 16 --threads 1 --max_steps 7")
ALL_ON += words("--eval_every 2 --save_every 3 --keep 9 --log_every 1 --init_from runs/source")
ALL_ON += words("--freeze conv1 bn1 layer1 --drop_path 0.5 --grad_checkpointing")
ALL_ON += words("--layer_decay 0.8 --ema_decay 0.7 --clip_value 0.1 --cooldown_steps 2")


@pytest.mark.full
def test_a_killed_run_with_everything_on_has_the_same_bits_on_other_processes(
    folder,
):
    # it changes no bit
    train_run(1, "whole", *[flag for flag in ALL_ON if flag != "--grad_checkpointing"])
    launch = start_ranks(2, slow_train, [*ALL_ON, "--resume", "auto"], 0.0, 4)
    until(lambda: Path("held-0").exists() and Path("held-1").exists())
    until(lambda: Path("runs/run/checkpoints/step-00000003").is_dir())
    launch.kill(signal.SIGKILL)
    launch.finish()
    outcomes = run_ranks(4, train.main, ["--run_name", "run", *ALL_ON, "--resume", "auto"])
    assert [outcome.code for outcome in outcomes] == [0] * 4, outcomes[0].err
    assert same_tensors(weights("run"), weights("whole"))
    assert same_tensors(*(weights(name, file="ema.safetensors") for name in ("run", "whole")))
    start, end = weights("source", "best"), weights("whole")
    frozen = {name for name in start if name.startswith(("conv1.", "bn1.", "layer1."))}
    assert {name for name in start if torch.equal(start[name], end[name])} == frozen
    sizes = {name: each.numel() for name, each in build(RESNET, 3).named_parameters()}
    trained = sum(size for name, size in sizes.items() if name not in frozen)
    assert f"{sum(sizes.values()):,} parameters, {trained:,} of them trained" in outcomes[0].out
    line = refused(train.main, *ALL_ON, *words("--run_name run --resume auto --freeze conv1"))
    assert "was trained with --freeze " in line


def test_the_rates_of_timms_blocks_grow_up_to_the_one_that_is_given():
    model = build(VIT, drop_path=0.4, model_args=SMALL_VIT)
    rates = [layer.drop_prob for layer in model.modules() if type(layer).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.4) and rates == sorted(rates)


# -- gradient checkpointing ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name, settings",
    [
        (RESNET, {"drop_path": 0.5}),
        (VIT, {"model_args": SMALL_VIT, "drop_path": 0.3}),
        pytest.param("mobilenet_v3_small", {}, marks=pytest.mark.full),
    ],
)
def test_checkpointed_blocks_have_the_same_bits_and_batch_statistics(name, settings):
    results, calls = [], []
    for again in (False, True):
        model = build(name, **settings)
        if again:
            checkpoint_blocks(model, name)
        names = [(type(layer).__name__, layer) for layer in model.modules()]
        block = next(layer for name, layer in names if re.search("Block|Residual", name))
        first = next(layer for layer in block.modules() if not list(layer.children()))
        first.register_forward_hook(lambda *_: calls.append(1))
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(4, 3, 32, 32)).square().sum().backward()
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, 32, 32))
        gradients = {key: each.grad for key, each in model.named_parameters()}
        results.append(dict(model.named_buffers()) | gradients)
    assert same_tensors(*results) and len(calls) == 3 + 5  # two updates and an evaluation
    with pytest.raises(UserError, match="--grad_checkpointing: mlp does not support it"):
        checkpoint_blocks(build("mlp"), "mlp")


@pytest.mark.full
def test_checkpointed_random_blocks_take_an_empty_batch_the_model_refuses(folder):
    """The third update has one sample: three of four microbatches are empty, and one rank of two
    has none.
    """
    flags = [*words("--data digits --model timm/test_vit --model_args"), "{drop_path_rate: 0.3}"]
    flags += words("--image_size 32 --global_batch_size 6 --max_train_samples 13 --max_steps 4")
    flags += words("--max_eval_samples 8 --lr 0.01 --threads 1 --microbatches 4")
    train_run(1, "plain", *flags)
    for processes in (1, 2):
        train_run(processes, f"on-{processes}", *flags, "--grad_checkpointing")
        assert same_tensors(weights("plain"), weights(f"on-{processes}"))
