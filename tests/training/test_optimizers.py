"""utils/training/optim.py: optimizers, groups and clipping of plain PyTorch and of timm."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from helpers.ranks import returned
from helpers.training_runs import (
    make_saver,
    optimizer_tensors,
    records,
    refused,
    rewrite_manifest,
    same_tensors,
    train_run,
    weights,
    words,
)
from safetensors.torch import load_file, save_file
from timm.optim import param_groups_layer_decay
from torch import nn

import train
from utils.config.cli import parse_args
from utils.data.spec import InputSpec
from utils.models.small import MnistCNN
from utils.runs.loading import load_optimizer
from utils.runs.manifest import OPTIMIZER
from utils.runs.save_state import check_savable
from utils.settings.train import TrainConfig
from utils.training.gradients import clip_gradients
from utils.training.muon import hidden_matrices
from utils.training.optim import (
    OPTIMIZERS,
    build_optimizer,
    layer_numbers,
    layer_scales,
    names_without_decay,
    parameter_groups,
    set_learning_rate,
    unwrap_optimizer,
)
from utils.training.schedule import learning_rate

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2}
TINY["num_classes"] = 3
SLOW = [pytest.param(name, marks=pytest.mark.full) for name in OPTIMIZERS if name != "muon"]


def tiny_vit():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    # the head and the norms' biases are zero, and would stay it for long
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double()  # some gradients are 0 but for rounding, which Adam would enlarge


def small_cnn():
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3, padding=1)
    layers = first, nn.BatchNorm2d(6), nn.ReLU(), second, nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 144, 5), nn.Linear(5, 3))


def settings(*flags):
    flags = [*words("--lr 0.01 --weight_decay 0.1"), *flags]
    return parse_args(TrainConfig, "train.py", flags, train.REGISTRIES)


def ten_updates(model, steps):
    """Train on ten fixed batches; `steps(update)` are the optimizers whose steps follow, with their
    learning rates.
    """
    generator = torch.Generator().manual_seed(1)
    for update in range(10):
        images, labels = torch.randn(6, 3, 16, 16, generator=generator), torch.arange(6) % 3
        images = images.to(next(model.parameters()).dtype)
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        for optimizer in steps(update):
            optimizer.step()
    return model.state_dict()


def trained(model, config):
    """Ten updates with the optimizer of the settings."""
    optimizer = build_optimizer(config, model)

    def steps(update):
        set_learning_rate(optimizer, learning_rate(config, update, 10))
        return [optimizer]

    return ten_updates(model, steps)


def closed_form(update):
    """Linear warm-up to 0.01 over two updates, then a cosine to 0 at the tenth."""
    return 0.005 * (update + 1 if update < 2 else 1 + math.cos(math.pi * (update - 2) / 8))


SCHEDULE = words("--lr_schedule cosine --warmup_steps 0.2")
PLAIN = {
    "sgd": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.8}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
}


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"muon"}))
def test_ten_updates_are_those_of_plain_pytorch_with_groups_decay_and_schedule(name):
    kind, options = PLAIN[name]
    plain, ours = tiny_vit(), tiny_vit()
    groups = []
    depths = {"cls": 0, "pos": 0, "patch": 0, "blocks.0": 1, "blocks.1": 2, "norm": 2, "head": 3}
    for key, parameter in plain.named_parameters():
        (layer,) = [depth for start, depth in depths.items() if key.startswith(start)]
        decay = 0.1 * (parameter.ndim > 1 and key not in ("cls_token", "pos_embed"))
        group = {"params": [parameter], "weight_decay": decay, "scale": 0.5 ** (3 - layer)}
        groups.append(group)
    optimizer = kind(groups, lr=0.01, **options)

    def steps(update):
        for group in optimizer.param_groups:
            group["lr"] = closed_form(update) * group["scale"]
        return [optimizer]

    expected = ten_updates(plain, steps)
    flags = ("--optimizer", kind.__name__, *words("--momentum 0.8 --layer_decay 0.5"))
    found = trained(ours, settings(*SCHEDULE, *flags))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-8, msg=key)
        assert not torch.equal(found[key], tiny_vit().state_dict()[key])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_muon_is_torchs_muon_on_hidden_matrices_and_torchs_adamw_on_the_rest(layout):
    # In float64, so that differences in the order of sums do not change how Muon rounds gradients
    # to bfloat16.
    plain, ours = small_cnn().double(), small_cnn().double().to(memory_format=layout)
    kernel, matrix = plain[3].weight, plain[7].weight
    # The matrix of a kernel, with its columns in the order of the memory: rounding to bfloat16
    # depends on it.
    order = (0, 2, 3, 1) if layout == torch.channels_last else (0, 1, 2, 3)
    flat = nn.Parameter(kernel.detach().permute(order).flatten(1).clone())
    rest = [p for p in plain.parameters() if p is not kernel and p is not matrix]
    muon = torch.optim.Muon(
        [flat, matrix], 0.0, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw"
    )
    decays = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in rest]
    adamw = torch.optim.AdamW(decays, 0.0, betas=(0.8, 0.9))

    def steps(update):
        flat.grad = kernel.grad.permute(order).flatten(1)
        for optimizer, scale in ((muon, 1.0), (adamw, 0.25)):
            for group in optimizer.param_groups:
                group["lr"] = scale * closed_form(update)
            optimizer.step()
        permuted = flat.detach().view(kernel.permute(order).shape)
        kernel.data.copy_(permuted.permute([order.index(dim) for dim in range(4)]))
        return []

    expected = ten_updates(plain, steps)
    flags = words("--optimizer muon --momentum 0.8 --optimizer_args")
    flags += ["{adamw_lr: 0.25, betas: [0.8, 0.9]}"]
    found = trained(ours, settings(*SCHEDULE, *flags))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7, msg=key)
    assert (expected["3.weight"] - small_cnn().state_dict()["3.weight"]).abs().mean() > 0.003


@pytest.fixture
def on_meta():
    """Models are created without values, which takes no time."""
    with torch.device("meta"):
        yield


def test_muon_leaves_the_stem_the_head_embeddings_and_grouped_kernels_to_adamw(on_meta):
    names = hidden_matrices(torchvision.models.vit_b_32())
    assert not names & {"conv_proj.weight", "heads.head.weight", "encoder.pos_embedding"}
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" in names
    model = torchvision.models.mobilenet_v3_small()
    kernels = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    others = {f"{name}.weight" for name, kernel in kernels if kernel.groups > 1}
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert others and hidden_matrices(model) == matrices - others - {
        "features.0.0.weight",
        "classifier.3.weight",
    }
    two_heads = hidden_matrices(timm.create_model("deit_tiny_distilled_patch16_224"))
    others = {"patch_embed.proj.weight", "head.weight", "head_dist.weight", "pos_embed"}
    assert two_heads and not two_heads & others


# Parameter groups


def scales_and_decays(model, *flags):
    groups = parameter_groups(settings(*flags), model)
    return {name: (g["lr_scale"], g["weight_decay"]) for g in groups for name, _ in g["params"]}


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resnet18", "swin_tiny_patch4_window7_224", "levit_128s"]
)
def test_timms_models_have_the_decay_and_the_layer_decay_of_timm(name, on_meta):
    model = timm.create_model(name)
    undecayed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups = param_groups_layer_decay(model, 0.1, no_weight_decay_list=undecayed, layer_decay=0.7)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {
        names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]
    }
    found = scales_and_decays(model, "--layer_decay", "0.7")
    least = 1 if name == "levit_128s" else 4  # older versions of timm do not know its layers
    assert found.keys() == expected.keys() and len(set(expected.values())) > least
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)
    assert {scale for scale, _ in scales_and_decays(model).values()} == {1.0}


def test_other_models_have_a_layer_for_each_block_in_their_order(on_meta):
    numbers = layer_numbers(torchvision.models.vit_b_32())
    blocks = [f"encoder.layers.encoder_layer_{block}.ln_1.weight" for block in range(12)]
    names = ["class_token", "encoder.pos_embedding", "conv_proj.weight", *blocks, "heads.head.bias"]
    assert [numbers[name] for name in names] == [0, 0, 0, *range(1, 13), 13]
    ours = layer_numbers(torchvision.models.resnet18())
    assert ours == layer_numbers(timm.create_model("resnet18")) and max(ours.values()) == 9
    found = layer_scales(MnistCNN(InputSpec(28, 28, 1, [0.5], [0.5]), 10), 0.5)
    scales = [found[f"{layer}.bias"] for layer in ("conv1", "conv2", "fc1", "fc2")]
    assert scales == [0.125, 0.25, 0.5, 1]


def test_embeddings_tokens_and_scales_of_torchvision_have_no_weight_decay(on_meta):
    tables = [n for n, _ in torchvision.models.swin_t().named_parameters() if "bias_table" in n]
    for name, expected in (
        ("vit_b_32", {"class_token", "encoder.pos_embedding"}),
        ("swin_t", {*tables}),
        ("resnet18", set()),
    ):
        model = torchvision.models.get_model(name)
        flat = {key for key, parameter in model.named_parameters() if parameter.ndim < 2}
        assert names_without_decay(model) == expected | flat


# Clipping


def test_values_are_clipped_before_the_norm_and_fp16_is_unscaled_once():
    model, calls = nn.Linear(3, 1, bias=False), []
    model.weight.grad = 8 * torch.tensor([[3.0, -0.5, 0.1]])

    def unscale():
        calls.append("unscale")
        model.weight.grad /= 8

    accelerator = SimpleNamespace(unscale_gradients=unscale)
    clip_gradients(accelerator, model, settings())
    assert calls == []
    norm = clip_gradients(accelerator, model, settings(*words("--clip_value 0.4 --clip_norm 0.2")))
    limited = torch.tensor([[0.4, -0.4, 0.1]])
    torch.testing.assert_close(norm, limited.norm())
    torch.testing.assert_close(model.weight.grad, 0.2 * limited / limited.norm())
    assert calls == ["unscale"]


# Whole runs


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            updates, share = state.get("updates", 0), state.get("share", 1.0)
            state |= {"updates": updates + 1, "share": share / 3, "none": None}


def test_numbers_in_the_state_of_an_optimizer_are_restored(tmp_path):
    returned(1, _save_and_load_numbers, tmp_path)


def _save_and_load_numbers(folder):
    layer = nn.Linear(2, 1)
    models = layer, nn.Linear(2, 1)
    optimizer, other = (Counting(each.named_parameters(), lr=0.1) for each in models)
    for _ in range(3):
        optimizer.step()
    load_optimizer(make_saver(layer, optimizer)(folder, 3), other)
    other.step()
    optimizer.step()
    states = [list(each.state.values()) for each in (optimizer, other)]
    assert states[0] == states[1] and [state["updates"] for state in states[1]] == [4, 4]


class Listing(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.grad]


def test_tensors_inside_a_list_are_refused_as_they_cannot_be_restored():
    model = nn.Linear(2, 1)
    optimizer = Listing(model.named_parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="state of this optimizer cannot be saved"):
        check_savable(optimizer)


RUN = ["--model_args", "{dropout: 0}", *words("--model mnist_cnn --image_size 12 --threads 1")]
RUN += words("--max_train_samples 480 --global_batch_size 120 --log_every 1 --save_every 3")
RUN += words("--lr_schedule constant --warmup_steps 2 --layer_decay 0.7 --clip_value 0.02")
RUN += words("--clip_norm 0.5 --eval_every 8 --keep 9 --max_steps 8")
BASE = ["--lr", "0.001"]
RATES = [0.0005, *[0.001] * 7]


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", *SLOW])
def test_runs_on_one_to_three_processes_agree_and_a_resumed_one_has_equal_bits(name):
    # Muon rounds to bfloat16, which enlarges differences in rounding: without them, the bits must
    # be the same.
    flags = [*RUN, *BASE, "--optimizer", name, *(["--microbatches", "4"] * (name == "muon"))]
    logs = {}
    for processes in (1, 2) if name == "muon" else (1, 2, 3):
        train_run(processes, str(processes), *flags)
        log = records(str(processes), "train")
        assert [record["lr"] for record in log] == pytest.approx(RATES)
        logs[processes] = [record["loss"] for record in log]
        assert logs[processes] == pytest.approx(logs[1], rel=1e-5)
    assert name != "muon" or same_tensors(weights("1"), weights("2"))
    checkpoint = "runs/2/checkpoints/step-00000003"
    returned(2, train.main, ["--run_name", "run", *flags, "--resume", checkpoint])
    assert same_tensors(weights("run"), weights("2"))
    assert same_tensors(*(weights(run, file=OPTIMIZER) for run in ("run", "2")))


def train_frozen_and_unused(flags):
    """Train mnist_cnn with a parameter that is not used; returns the bits of weights and state
    before training.
    """
    build, train_all, bits = train.build_model, train.train, {}

    def with_unused(*arguments):
        model = build(*arguments)
        model.fc1.unused = nn.Parameter(torch.ones(2, 2))
        return model

    def keep(run, profiler):
        states = {name: run.optimizer.state.get(p, {}) for name, p in run.module.named_parameters()}
        tensors = run.module.state_dict()
        for name, state in states.items():
            tensors |= {f"{name}/{key}": value for key, value in state.items()}
        bits.update({name: bytes_of(tensor) for name, tensor in tensors.items()})
        return train_all(run, profiler)

    train.build_model, train.train = with_unused, keep
    train.main(["--run_name", "run", *flags])
    return bits


def bytes_of(tensor):
    return tensor.clone().flatten().view(torch.uint8)


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", *SLOW])
def test_a_resume_in_other_groups_changes_no_bit_of_the_weights_and_the_state(name):
    flags = [*RUN, *BASE, *words("--freeze conv1 --find_unused_parameters --weight_decay 0.1")]
    flags += ["--optimizer", name, "--max_steps", "3"]
    returned(1, train_frozen_and_unused, flags)
    folder = Path("runs/run/checkpoints/step-00000003")
    saved = load_file(folder / "model.safetensors")
    for key in ("conv1.weight", "conv2.weight", "conv2.bias", "fc1.unused"):
        saved[key].flatten()[0] = -0.0
    save_file(saved, folder / "model.safetensors")
    rewrite_manifest(folder)
    expected = saved | optimizer_tensors(folder)
    unused = "conv1", "fc1.unused/exp", "fc1.unused/square"
    assert not any(key.startswith(unused) for key in expected.keys() - saved)
    for processes in (1, 2):
        resumed = [*flags, *words("--resume auto --layer_decay null")]  # other groups
        for bits in returned(processes, train_frozen_and_unused, resumed):
            assert bits.keys() == expected.keys()
            assert [k for k, v in expected.items() if not bits[k].equal(bytes_of(v))] == []


# What is refused or reported


def test_sgd_has_all_its_momentum_before_the_first_update_also_with_fp16():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    wrapped = SimpleNamespace(optimizer=optimizer)  # as Accelerate wraps it
    for scaler, expected in ((None, optimizer), (1, wrapped)):
        accelerator = SimpleNamespace(scaler=scaler, is_fsdp2=False, device=torch.device("cpu"))
        assert unwrap_optimizer(wrapped, accelerator) is expected
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in model.parameters())


def test_muon_needs_hidden_matrices_and_names_are_found_in_any_case():
    error = refused(train.main, *words("--model mlp --optimizer Muon --max_steps 1"))
    assert "--optimizer muon: this model has no hidden matrices to train; use adamw" in error


def test_an_optimizer_of_a_plug_in_adds_to_the_groups_of_parameters(monkeypatch):
    class Own(torch.optim.SGD):
        """SGD, faster for biases."""

        def __init__(self, groups, config):
            super().__init__(groups, lr=config.lr)

        @staticmethod
        def groups(model):
            names = [name for name, _ in model.named_parameters()]
            return {name: {"nesterov": False, "boost": name.endswith("bias")} for name in names}

    monkeypatch.setitem(OPTIMIZERS, "own", Own)
    model = small_cnn()
    optimizer = build_optimizer(settings("--optimizer", "own", "--weight_decay", "0.1"), model)
    boosts = {id(p): g["boost"] for g in optimizer.param_groups for p in g["params"]}
    biases = {id(p): name.endswith("bias") for name, p in model.named_parameters()}
    assert boosts == biases and set(boosts.values()) == {True, False}
