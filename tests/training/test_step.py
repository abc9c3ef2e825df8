"""A fast step is the same step: layout, compilation, precision, memory, traces."""

import ctypes
import gc
import gzip
import json
import resource
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.ranks import returned, run_ranks
from helpers.training_runs import records, same_tensors, train_run, weights, words
from torch.nn import functional as F

import eval as evaluation
import train
from utils import memory as host
from utils.data.spec import InputSpec
from utils.models.small import MnistCNN
from utils.ranks import accelerator
from utils.ranks.session import distributed_session
from utils.settings.train import TrainConfig

DIGITS = words("--global_batch_size 120 --max_steps 6 --log_every 1 --threads 1")


def tutorial(net, x):
    """The network as the tutorials write it, each pixel convolved and each map dropped before it is
    pooled.
    """
    x = F.relu(F.max_pool2d(F.conv2d(x, net.conv1.weight, net.conv1.bias), 2))
    x = F.dropout2d(F.conv2d(x, net.conv2.weight, net.conv2.bias), 0.5, net.training)
    x = F.relu(net.fc1(F.relu(F.max_pool2d(x, 2)).flatten(1)))
    return net.fc2(F.dropout(x, 0.5, net.training))


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (31, 3)])
@pytest.mark.parametrize("count", [0, 50])
def test_mnist_cnn_is_the_network_of_the_tutorials_with_dropout_and_ties(side, channels, count):
    net = MnistCNN(
        InputSpec(side, side, channels, [0.5] * channels, [0.5] * channels), 10, dropout=0.5
    )
    images, labels = torch.rand(count, channels, side, side), torch.arange(count) % 10
    images[:, :, :9] = 0  # as around a digit: all four values of a pooling are the same there
    gradients = []
    for forward in (net, partial(tutorial, net)):
        torch.manual_seed(1)
        loss = F.cross_entropy(forward(images), labels, reduction="sum")
        gradients.append(torch.autograd.grad(loss, list(net.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.eval()(images), tutorial(net, images), rtol=1e-5, atol=1e-5)


def test_a_number_that_is_none_in_a_kernel_reaches_the_logits():
    for ruined in (float("nan"), float("inf")):
        model = MnistCNN(InputSpec(28, 28, 1, [0.5], [0.5]), 10)
        model.get_parameter("conv1.weight").data.flatten()[0] = ruined
        assert not model(torch.rand(8, 1, 28, 28)).isfinite().any()


@pytest.mark.full
def test_a_resume_with_another_layout_of_the_kernels_ends_with_the_same_weights():
    flags = [*DIGITS, *words("--save_every 3 --lr 0.05 --optimizer adamw")]
    train_run(1, "plain", *flags)
    resume = words("--channels_last false --resume runs/plain/checkpoints/step-00000003")
    train_run(1, "other", *flags, *resume)
    torch.testing.assert_close(weights("other"), weights("plain"), rtol=0, atol=1e-6)


def _compiled(main, flags):
    import os

    # as accelerate's launcher sets it for `dynamo_config`
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "aot_eager"
    torch._dynamo.utils.counters.clear()
    main(flags)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.full
def test_a_compiled_run_has_the_losses_and_the_checkpoint_keys_of_an_uncompiled_one():
    train_run(2, "plain", *DIGITS)
    assert min(returned(2, _compiled, train.main, ["--run_name", "compiled", *DIGITS])) > 0
    # three blocks, so that each rank has one
    flags = words("--ckpt runs/compiled --eval_batch_size 60")
    assert min(returned(2, _compiled, evaluation.main, flags)) > 0
    losses = [[r["loss"] for r in records(name, "train")] for name in ("plain", "compiled")]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert list(weights("compiled")) == list(weights("plain"))


@pytest.mark.full
def test_the_compiler_is_printed_and_saved_and_a_change_on_resume_is_said():
    flags = words("--model mlp --threads 1 --run_name run --resume auto --save_every 1 --max_steps")
    (first,) = run_ranks(1, _compiled, train.main, [*flags, "1"])
    assert ", compiled by aot_eager\n" in first.out
    (other,) = run_ranks(1, train.main, [*flags, "2"])
    assert "compiler was" not in first.out and "compiled by" not in other.out
    assert "compiler was aot_eager in the checkpoint, now none\n" in other.out


def _precision(natives, asked):
    config = TrainConfig(mixed_precision=asked)
    with distributed_session("train.py", config) as ranks:
        ranks.join()
        accelerator.has_native_bf16 = lambda device: natives[ranks.topology.rank]
        return accelerator.make_accelerator(ranks, config, fixed_order=False).mixed_precision


@pytest.mark.parametrize(
    ("natives", "expected"), [([True, True], "bf16"), ([True, False], "no"), ([False], "no")]
)
def test_automatic_precision_is_bf16_only_where_all_ranks_have_it(natives, expected):
    assert returned(len(natives), _precision, natives, "auto") == [expected] * len(natives)


@pytest.mark.full
def test_gradients_are_exchanged_as_the_hook_says():
    def first_momentum(name, *flags):  # after one update it is the gradient
        train_run(2, name, *DIGITS, *words("--model mlp --max_steps 1 --weight_decay 0"), *flags)
        momenta = weights(name, file="optimizer.bin").values()
        return torch.cat([momentum.flatten() for momentum in momenta])

    exact, rounded = first_momentum("exact"), first_momentum("rounded", "--comm_hook", "bf16")
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    torch.testing.assert_close(rounded, exact, rtol=2**-7, atol=2**-8 * float(exact.abs().max()))


def _faults_of_reuse(keep):
    faults = []
    # the thresholds of malloc, which an earlier test in this process may have raised
    for option in (-1, -3):
        ctypes.CDLL(None).mallopt(option, 2**17)
    with distributed_session("train.py", TrainConfig()) if keep else nullcontext():
        for _ in range(8):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            tensors = [torch.ones(2**24) for _ in range(2)]  # 64 MiB each, 32768 pages in all
            del tensors
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults[2:]


def test_freed_memory_is_used_again_without_faulting_it_in_anew():
    # The system may take pages away or give huge ones at any time, but not each time.
    assert min(returned(1, _faults_of_reuse, True)[0]) < 100
    assert max(returned(1, _faults_of_reuse, False)[0]) > 1000


def test_the_garbage_collector_leaves_out_what_start_up_made_as_long_as_asked():
    before = gc.get_freeze_count()
    with host.gc_frozen():
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.full
def test_a_profiled_run_leaves_a_trace_for_each_rank():
    flags = [*DIGITS, *words("--max_steps 25 --eval_every 25")]
    main, other = run_ranks(2, train.main, ["--run_name", "run", *flags, "--profile"])
    assert main.code == other.code == 0 and other.out == ""
    assert "trace: runs/run/trace-rank0.json.gz" in main.out
    for rank in (0, 1):
        trace = gzip.decompress(Path(f"runs/run/trace-rank{rank}.json.gz").read_bytes())
        events = json.loads(trace)["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "cpu_op"]
        assert names.count("aten::cross_entropy_loss") == 10
    assert not list(Path("runs/run").glob(".partial*"))
    train_run(2, "plain", *flags)
    assert same_tensors(weights("run"), weights("plain"))
