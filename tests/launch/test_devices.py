"""utils/launch/devices.py without a GPU: which a rank takes, errors, precision, kernels."""

import itertools
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.commands import launch as accelerate_launch
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from helpers.ranks import returned, run_ranks
from helpers.training_runs import ROOT, refused, start
from helpers.waiting import SOON
from torch import nn

import doctor
import train
import utils.models.zoo
from utils.errors import UserError, is_lost_rank
from utils.launch import devices
from utils.launch.command import precision_is_chosen
from utils.launch.devices import check_shared_gpus, choose_device
from utils.launch.environment import Topology
from utils.launch.exits import with_known_fix
from utils.models.small import MLP
from utils.ranks import accelerator as wrapping
from utils.ranks.ranks import connect_timeout
from utils.ranks.session import distributed_session
from utils.settings.train import TrainConfig

CUDA = torch.device("cuda", 0)


# Launching.


def _ddp_arguments(device_type):
    with distributed_session("train.py", TrainConfig(threads=1)) as ranks:
        ranks.join()
        ranks.device = torch.device(device_type)
        accelerator = wrapping.make_accelerator(
            ranks, TrainConfig(mixed_precision="no"), fixed_order=False
        )
        found = {}
        torch.nn.parallel.DistributedDataParallel = lambda net, **given: found.update(given) or net
        for state in (PartialState(), accelerator.state):
            state.distributed_type, state.num_processes = DistributedType.MULTI_GPU, 2
        accelerator.prepare(nn.Linear(1, 1))
        return found


def test_ddp_is_given_no_gpu_number_as_a_task_may_see_only_one_gpu():
    found = returned(1, _ddp_arguments, "cuda")[0]
    assert found["device_ids"] is found["output_device"] is None
    assert found["gradient_as_bucket_view"] is True


def test_a_configuration_keeps_the_gpus_that_a_scheduler_has_chosen(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"CUDA_VISIBLE_DEVICES": "3"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name in ("1gpu", "2gpu", "4gpu", "8gpu"):
        words = ["--config_file", str(ROOT / f"accelerate_configs/{name}.yaml"), "train.py"]
        parsed = accelerate_launch.launch_command_parser().parse_args(words)
        checked, _, _ = accelerate_launch._validate_launch_command(parsed)
        assert checked.gpu_ids == "all" and bool(checked.multi_gpu) == (name != "1gpu")
        assert prepare_simple_launcher_cmd_env(checked)[1]["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A machine with two GPUs that PyTorch cannot use, as with an old driver."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    program.chmod(0o755)
    monkeypatch.setattr(os, "environ", os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def test_gpus_that_pytorch_cannot_use_are_refused(two_gpus):
    for visible in (None, "1,0", "GPU-8932f937"):
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        with pytest.raises(UserError, match="nvidia-smi lists 2 GPUs, but PyTorch finds none"):
            choose_device(Topology(), cpu=False)
    assert choose_device(Topology(), cpu=True).type == "cpu"
    (outcome,) = run_ranks(1, doctor.main, [])
    assert outcome.code == 1 and "nvidia-smi lists 2 GPUs" in outcome.out
    for hidden in ("", "-1", "NoDevFiles"):  # by the user
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden
        assert choose_device(Topology(), cpu=False).type == "cpu"


KNOWN = {
    "ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1": "two ranks share a GPU",
    "Multiple Ranks are using the same GPU/Partition": "two ranks share a GPU",
    "CUDA error: no kernel image is available for execution on the device": "does not support this",
}


@pytest.mark.parametrize("text", KNOWN)
def test_errors_of_cuda_and_nccl_with_a_known_cause_have_a_fix(text):
    error = with_known_fix(RuntimeError(text))
    assert isinstance(error, UserError) and KNOWN[text] in error.problem and error.fix


# Errors and timeouts.


def test_the_messages_of_both_nccl_classes_are_recognised_as_a_lost_rank():
    start = "NCCL Async Error: remote process exited or there was a network error"
    broken = "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    for text in (start, "NCCL operation timed out", broken):
        assert is_lost_rank(dist.DistBackendError(text))


def test_only_a_class_that_starts_nccl_has_the_whole_timeout_to_connect(monkeypatch):
    assert [connect_timeout("nccl", n, 600) for n in (2, 64)] == [36, 72]  # as utils sets it
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    assert [connect_timeout("nccl", n, 600) for n in (2, 64)] == [600, 600]
    assert [connect_timeout("gloo", n, 600) for n in (2, 32, 64)] == [36, 36, 72]
    assert connect_timeout("gloo", 2, 5) == 5


class Unordered(MLP):
    """It has an operation without a deterministic kernel, as average pooling to 7x7 is on a GPU
    (vgg11).
    """

    def forward(self, images):
        if self.training and len(images) > 2:  # not when the model is tried
            torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        return super().forward(images)


def _train_unordered(flags):
    utils.models.zoo.OWN_MODELS["unordered"] = Unordered
    train.main([*flags, *shlex.split("--model unordered --max_steps 1 --threads 1")])


def test_an_operation_without_a_deterministic_kernel_is_named_with_the_fix():
    line = refused(_train_unordered, "--deterministic")
    assert line.startswith("train.py: error: put_ does not have a deterministic implementation;")


FAILING = """
import sys, threading, torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from utils.settings.train import TrainConfig
from utils.ranks.session import distributed_session
with distributed_session("train.py", TrainConfig(threads=1, cpu=True)):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.get_backend = lambda: "nccl"
    dist.destroy_process_group = lambda: threading.Event().wait()  # for the other ranks, forever
    ThreadPoolExecutor(1).submit(lambda: Path("saved").touch())
    print("out", end="")
    raise RuntimeError("a bug")
"""


@pytest.mark.full
def test_after_an_error_a_rank_does_not_wait_for_nccl_and_its_output_is_complete():
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", FAILING]
    outcome = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SOON)
    assert outcome.returncode == 1 and outcome.stdout == "out" and Path("saved").exists()
    assert outcome.stderr.splitlines()[-1].endswith("RuntimeError: a bug")


# Precision and kernels.


def kernels_after(*runs):
    """Which kernels a process uses after runs with these arguments."""
    for device, deterministic, tf32 in runs:
        wrapping.choose_kernels(device, deterministic, tf32)
    fixed = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    assert not (filled and fixed)  # it would take a kernel for each tensor
    tf32 = torch.backends.cudnn.allow_tf32
    return fixed, filled, tf32, torch.get_float32_matmul_precision()


@pytest.mark.parametrize(
    ("deterministic", "asked", "expected"),
    [(False, None, True), (True, None, False), (True, True, True)],
)
def test_tf32_is_off_with_deterministic_unless_it_is_asked_for(deterministic, asked, expected):
    (found,) = returned(1, kernels_after, (CUDA, deterministic, asked))
    assert found[2:] == (expected, "high" if expected else "highest")


@pytest.mark.full
def test_a_run_does_not_inherit_the_kernels_of_an_earlier_run_in_its_process():
    runs = [
        (device, fixed, None) for device in (CUDA, torch.device("cpu")) for fixed in (True, False)
    ]
    for before, last in itertools.pairwise([*runs, *runs[::-1], runs[2]]):
        assert returned(1, kernels_after, before, last) == returned(1, kernels_after, last)


# The command up to the script, what the launcher exports, its config file, and whether someone has
# chosen.
LAUNCHES = [
    ("train.py", None, None, False),  # plain Python or torchrun
    ("train.py", "no", None, True),  # by hand
    ("accelerate launch train.py", "no", None, False),
    ("accelerate-launch --mixed-precision=no train.py", "no", None, True),
    ("accelerate launch --config_file own.yaml train.py", "no", "num_processes: 1\n", False),
    ("accelerate launch --config_file=own.yaml train.py", "no", "mixed_precision: 'no'\n", True),
    ("accelerate launch -m train", "no", None, False),
    ("accelerate launch -m lab.train", "no", None, False),
    ("accelerate launch -m --mixed_precision no train", "no", None, True),
]


@pytest.mark.parametrize(("words", "exported", "file", "expected"), LAUNCHES)
def test_a_precision_is_chosen_by_a_flag_or_a_file_not_by_an_export(
    words, exported, file, expected, monkeypatch
):
    typed = ["python", *words.split(), "--mixed_precision", "ours"]
    launcher = SimpleNamespace(cmdline=lambda: typed)
    monkeypatch.setattr(psutil, "Process", lambda number: launcher)
    monkeypatch.setattr(sys, "argv", ["lab/train.py", *typed[-2:]])
    monkeypatch.setattr(
        "accelerate.commands.config.config_args.default_config_file", "default.yaml"
    )
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if exported:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", exported)
    if words != "train.py":  # as the launcher exports it
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    Path("own.yaml").write_text(file or "")
    assert precision_is_chosen() == expected
    if words == "accelerate launch train.py":
        # as `accelerate config` writes it
        Path("default.yaml").write_text("mixed_precision: 'no'\n")
        assert precision_is_chosen()


SAYS = """
from utils.launch.command import precision_is_chosen
import os
print("chosen:", os.environ["ACCELERATE_MIXED_PRECISION"], precision_is_chosen())
"""


@pytest.mark.full
@pytest.mark.parametrize("script", ["says.py", "-m says"])
def test_accelerates_launcher_is_recognised(script):
    Path("says.py").write_text(SAYS)
    config = f"{ROOT}/accelerate_configs/2cpu.yaml"
    command = f"accelerate launch --config_file {config} {script}"
    _, out, err = start(*command.split(), PYTHONPATH=str(ROOT))
    assert "chosen: no False" in out, err


def _precision(device, asked, exported):
    os.environ |= {"ACCELERATE_MIXED_PRECISION": exported} if exported else {}
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    config = TrainConfig(mixed_precision=asked)
    with distributed_session("train.py", config) as ranks:
        ranks.join()
        ranks.device = torch.device(device)
        return wrapping.make_accelerator(ranks, config, fixed_order=False).mixed_precision


@pytest.mark.parametrize(
    ("device", "asked", "exported", "expected"),
    [
        ("cuda", None, None, "bf16"),
        ("cuda", None, "no", "no"),
        ("cuda", "no", None, "no"),
        ("cpu", None, None, "no"),
    ],
)
def test_on_a_gpu_the_precision_is_automatic_if_nobody_has_chosen_it(
    device, asked, exported, expected
):
    assert returned(1, _precision, device, asked, exported) == [expected]


def _kernels_searched(flags, least):
    class Watched(MLP):
        def forward(self, images):
            if len(images) >= 8:  # not when the model is built and tried
                kind = "full" if len(images) == 64 else "last"
                seen.add((kind if self.training else "eval", torch.backends.cudnn.benchmark))
            return super().forward(images)

    seen: set = set()
    utils.models.zoo.OWN_MODELS["mlp"] = Watched
    wrapping._LONG = least
    train.main(flags)
    return seen


SEARCHED = {
    "a long run": ("", 8, {("full", True), ("last", False), ("eval", False)}),
    "a short run": ("", 9, {("full", False), ("last", False), ("eval", False)}),
    "--deterministic": ("--deterministic", 8, {("full", False), ("last", False), ("eval", False)}),
}


@pytest.mark.parametrize("kind", SEARCHED)
def test_cudnn_searches_only_in_a_long_run_and_not_for_the_smaller_last_batch(kind):
    more, least, expected = SEARCHED[kind]
    flags = f"--model mlp --max_train_samples 200 --global_batch_size 64 --max_steps 8 {more}"
    flags += " --eval_every 4 --threads 1 --report false"
    assert returned(1, _kernels_searched, shlex.split(flags), least) == [expected]


@pytest.mark.parametrize("version", [(2, 29, 7), (2, 30, 0)])
@pytest.mark.parametrize("enabled", ["0", "1"])
def test_ranks_that_share_a_gpu_are_named_before_nccl_starts(version, enabled, monkeypatch, capsys):
    monkeypatch.setattr(devices, "nccl_version", lambda: version)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
    for apart in ([("x", "")] * 3, [("x", "a"), ("y", "a"), ("x", "b")]):
        check_shared_gpus(apart, "nccl")
    assert capsys.readouterr().out == ""
    shared = [("y", "a"), ("x", "a"), ("x", "a")]
    check_shared_gpus(shared, "gloo")
    assert "ranks 1, 2 share a GPU: training is slower" in capsys.readouterr().out
    nccl = ".".join(map(str, version))
    text = f"ranks 1, 2 share a GPU, which NCCL {nccl} does not allow; start at most one"
    refused = pytest.raises(UserError, match=text)
    with nullcontext() if enabled == "1" and version >= (2, 30) else refused:
        check_shared_gpus(shared, "nccl")
        assert "ranks 1, 2 share a GPU: training is slower" in capsys.readouterr().out


SHARED = """
import sys
from utils.settings.train import TrainConfig
from utils.launch import devices
from utils.ranks import ranks
ranks.gpu_id = lambda device: "GPU-1"
ranks.choose_backend = lambda *_: "nccl"
devices.nccl_version = lambda: (2, 28, 9)
from utils.ranks.session import distributed_session
with distributed_session("train.py", TrainConfig(threads=1, cpu=True)) as joining:
    joining.join()
"""


@pytest.mark.full
def test_each_rank_reads_that_it_shares_its_gpu_before_rank_0_ends():
    Path("shared.py").write_text(SHARED)
    words = f"{sys.executable} -m torch.distributed.run --nproc_per_node 3 shared.py"
    code, out, err = start(*words.split(), PYTHONPATH=str(ROOT))
    lines = (out + err).splitlines()
    (line,) = [line for line in lines if line.startswith("train.py: error")]
    assert code and "ranks 0, 1, 2 share a GPU, which NCCL 2.28.9 does not allow; start" in line
