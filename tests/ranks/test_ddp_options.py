"""DistributedDataParallel: batch statistics, unused parameters, what it measures."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import returned
from helpers.training_runs import records, refused, train_run, train_watched, weights, words
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import train
import utils.models.zoo
from utils.data.order import Plan
from utils.data.samplers import UpdateSampler
from utils.models.layers import check_batch_norm
from utils.ranks.batchnorm import convert_batch_norm
from utils.ranks.session import distributed_session
from utils.settings.train import TrainConfig
from utils.training.gradients import make_gradients


def column(values):
    return values[:, None, None]


# What the kernels of PyTorch's layer compute on a GPU; a CPU does not have them.
def batch_norm_stats(input, eps):
    variance, mean = torch.var_mean(input.float(), (0, 2, 3), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input, mean, invstd, running_mean, running_var, momentum, eps, counts
):
    total, shares = counts.sum(), (counts / counts.sum())[:, None]
    centre = (shares * mean).sum(0)
    variance = (shares * (invstd**-2 - eps + (mean - centre) ** 2)).sum(0)
    running_mean.lerp_(centre, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return centre, (variance + eps).rsqrt()


def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    result = (input - column(mean)) * column(invstd * weight) + column(bias)
    return result.to(input.dtype)


def batch_norm_backward_reduce(grad, input, mean, invstd, weight, *_wanted):
    products = (grad * (input - column(mean))).sum((0, 2, 3))
    total = grad.float().sum((0, 2, 3))
    return total, products, products * invstd, total


def batch_norm_backward_elemt(grad, input, mean, invstd, weight, total, products, counts):
    slope = (input - column(mean)) * column(invstd**2 * products / counts.sum())
    result = (grad - column(total / counts.sum()) - slope) * column(invstd * weight)
    return result.to(input.dtype)


def allow_fused_layer() -> torch.library.Library:
    """Let PyTorch's layer run on the CPU while the result lives."""
    kernels = torch.library.Library("aten", "IMPL", "CPU")
    for kernel in (
        batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
        batch_norm_backward_reduce, batch_norm_backward_elemt,
    ):  # fmt: skip
        kernels.impl(kernel.__name__, kernel)
    torch._C._get_privateuse1_backend_name = lambda: "cpu"  # a kind of device that it allows
    return kernels


def synchronised_step(shares: list[int], fused: torch.dtype | None = None) -> tuple:
    """This rank's share of one batch through a synchronised layer: output, gradients and running
    statistics.
    """
    kernels = allow_fused_layer() if fused else None
    with distributed_session("train.py", TrainConfig(threads=1)) as ranks:
        ranks.join()
        layer, images, weights = material()
        layer = convert_batch_norm(nn.Sequential(layer), fused is not None)
        assert isinstance(layer[0], nn.SyncBatchNorm) == (kernels is not None)
        begin = sum(shares[: ranks.topology.rank])
        own = images[begin : begin + shares[ranks.topology.rank]].to(fused).requires_grad_()
        output = layer(own)
        (output * weights[begin : begin + len(own)]).sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert all(each is not None for each in (own.grad, *gradients))
        return output.detach(), own.grad, gradients, [buffer.clone() for buffer in layer.buffers()]


def material():
    random = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
    images = 5 + 3 * torch.randn(11, 3, 4, 4, generator=random)
    return layer, images, torch.randn(11, 3, 4, 4, generator=random)


# `fused`: the images' type in PyTorch's layer, which GPUs use
@pytest.mark.full
@pytest.mark.parametrize("fused", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [[6, 5], [10, 1], [4, 7, 0]])
def test_synchronised_statistics_and_gradients_are_those_of_the_whole_batch(shares, fused):
    layer, images, weights = material()
    images = images.to(fused).float()
    expected = layer(images.requires_grad_())
    (expected * weights).sum().backward()
    found = returned(len(shares), synchronised_step, shares, fused)
    outputs, own, gradients, buffers = zip(*found, strict=True)
    close = partial(torch.testing.assert_close, check_dtype=False)
    if fused == torch.bfloat16:
        close = partial(close, rtol=0.02, atol=0.05)
    close(torch.cat(outputs), expected.detach())
    close(torch.cat(own), images.grad)
    for parameter, parts in zip(layer.parameters(), zip(*gradients, strict=True), strict=True):
        close(sum(parts), parameter.grad)
    for found in buffers:
        close(found, list(layer.buffers()))


def test_a_step_without_samples_on_any_process_leaves_the_running_statistics():
    for output, _, _, (mean, variance, _) in returned(2, synchronised_step, [0, 0]):
        assert len(output) == 0 and mean.eq(0).all() and variance.eq(1).all()


def begin_without_samples() -> None:
    kernels = allow_fused_layer()
    with distributed_session("train.py", TrainConfig(threads=1)) as ranks:
        ranks.join()
        module = convert_batch_norm(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), True)
        before = copy.deepcopy(module.state_dict())
        DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # it refuses CPUs
        model = DistributedDataParallel(module, broadcast_buffers=False)
        place = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
        task = SimpleNamespace(loss=lambda outputs, labels: outputs.sum())
        plan = Plan(16, global_batch_size=8, microbatches=2, seed=0)
        setup = SimpleNamespace(config=TrainConfig(), accelerator=place, task=task, plan=plan)
        none = SimpleNamespace(no_images=torch.empty(0, 3, 4, 4), no_labels=None)
        make_gradients(setup, model, none)
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        model(torch.randn(2, 3, 4, 4)).square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
        del kernels


def test_the_layer_of_gpus_survives_the_empty_batches_at_the_start():
    returned(2, begin_without_samples)


def test_a_layer_that_does_more_than_normalise_is_refused_by_name():
    timm = pytest.importorskip("timm")
    with pytest.raises(ValueError, match="BatchNormAct2d is not plain batch normalisation"):
        convert_batch_norm(timm.create_model("efficientnet_b0"))


def test_a_step_of_one_sample_on_all_processes_together_is_refused():
    refused = []
    for samples in range(9, 17):
        plan = Plan(samples, global_batch_size=8, microbatches=4, seed=0)
        emitted = [len(microbatch.indices) for microbatch in UpdateSampler(plan, 2, 2)]
        # each of both ranks together
        steps = [sum(emitted[i : i + 2]) for i in range(0, len(emitted), 2)]
        if 1 in steps:
            refused.append(samples)
            with pytest.raises(ValueError, match="more than one sample"):
                check_batch_norm(plan, 2, together=2)
        else:
            check_batch_norm(plan, 2, together=2)
    # the last update has one to three samples, for two steps of two ranks
    assert refused == [9, 10, 11]


@pytest.mark.full
def test_a_run_with_synchronised_batch_statistics_has_the_losses_of_one_process():
    flags = words("--model resnet18 --global_batch_size 14 --max_steps 5 --log_every 1")
    flags += words("--threads 1 --lr 0.0005 --max_train_samples 61 --max_eval_samples 20")
    for processes in (1, 2):  # the fifth update has 3 + 2 samples
        train_run(processes, f"on-{processes}", *flags, "--sync_batchnorm")
    alone, both = ([line["loss"] for line in records(f"on-{n}", "train")] for n in (1, 2))
    # So few samples and so many layers multiply the rounding of each update some twenty times.
    assert both[:2] == pytest.approx(alone[:2], rel=1e-6) and both == pytest.approx(alone, rel=2e-3)
    one, two = (records(f"on-{n}", "eval")[-1]["loss"] for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-3)


class Changing(nn.Module):
    """A network whose second half is one of two layers: always the first, or in turn."""

    def __init__(self, spec, classes: int, always: bool = True):
        super().__init__()
        self.first = nn.Linear(spec.height * spec.width * spec.channels, 16)
        self.always, self.turn = always, 0
        self.second = nn.ModuleList(nn.Linear(16, classes) for _ in range(2))

    def forward(self, images):
        # in the place of an empty batch, such as that which settles DDP's buckets, two images run
        self.turn += len(images) > 2
        number = 0 if self.always else self.turn % 2
        return self.second[number](torch.relu(self.first(images.flatten(1))))


def train_changing(name: str, always: bool, *flags: str) -> None:
    utils.models.zoo.OWN_MODELS["mlp"] = Changing
    settings = words("--model mlp --global_batch_size 120 --max_steps 5 --log_every 1 --threads 1")
    settings += ["--lr", "0.01", "--model_args", f"{{always: {str(always).lower()}}}"]
    train.main([*settings, "--run_name", name, *flags])


@pytest.mark.full
def test_unused_parameters_are_refused_with_the_flags_that_fix_it():
    line = refused(lambda flags: train_changing("run", True, *flags), processes=2)
    assert "set --find_unused_parameters, or name the unused ones in --freeze" in line


@pytest.mark.full
@pytest.mark.parametrize(
    ("always", "flag"),
    [
        (True, ["--freeze", "second.1"]),
        (False, ["--find_unused_parameters"]),
        pytest.param(True, ["--find_unused_parameters"], marks=pytest.mark.full),
    ],
)
def test_unused_parameters_train_as_on_one_process(always, flag):
    # So many accumulation steps that a microbatch takes the same layer in both.
    for processes, flags in ((1, ["--grad_accum", "4"]), (2, ["--grad_accum", "2", *flag])):
        returned(processes, train_changing, f"on-{processes}", always, *flags)
    alone, both = ([line["loss"] for line in records(f"on-{n}", "train")] for n in (1, 2))
    assert len(both) == 5 and both == pytest.approx(alone, rel=1e-5)


class Refusing(Changing):
    """It takes no empty batch, and weights that it does not use must not change."""

    def forward(self, images):
        if not len(images):
            raise ValueError("no images")
        return super().forward(images)


def train_refusing(*flags: str) -> None:
    utils.models.zoo.OWN_MODELS["mlp"] = Refusing
    settings = words("--model mlp --threads 1 --lr 0.01 --weight_decay 0.1 --optimizer adamw")
    settings += words("--global_batch_size 24 --max_train_samples 25 --max_steps 6")
    train.main([*settings, "--find_unused_parameters", *flags])


@pytest.mark.full
def test_unused_parameters_stay_if_a_rank_has_no_samples():
    for processes in (1, 2):  # every second update has one sample
        returned(processes, train_refusing, "--run_name", f"on-{processes}")
    alone, both = weights("on-1"), weights("on-2")
    assert torch.equal(alone["second.1.weight"], both["second.1.weight"])
    assert torch.allclose(alone["first.weight"], both["first.weight"], atol=1e-5)


def last_measured_update(flags):
    """The last update that DDP has measured, for which it waits for the GPU."""
    seen = []
    train_watched(flags, after=lambda run: seen.append(run.model._get_ddp_logging_data()))
    return seen[-1]["iteration"]


@pytest.mark.full
def test_ddp_measures_only_its_first_updates():
    flags = words("--model mlp --max_train_samples 60 --global_batch_size 2 --max_steps 110")
    measured = returned(2, last_measured_update, [*flags, *words("--threads 1 --report false")])
    assert max(measured) <= 10
