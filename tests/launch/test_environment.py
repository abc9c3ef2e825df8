"""utils/launch/environment.py: variables for PyTorch and NCCL, launches of one process."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.environments import variables_of
from helpers.launched_runs import begin, ranks_of
from helpers.ranks import free_port, returned, run_ranks, start_ranks
from helpers.training_runs import MLP, ROOT, full, start, words
from helpers.waiting import lives, until
from PIL import Image

import doctor
import eval as evaluation
import predict
import replay
import train
from utils.ranks import accelerator as wrapping

SET = {
    "OMP_WAIT_POLICY": "passive",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DIST_USE_NCCL2": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
}
SHORT = [*MLP, "--max_steps", "2", "--run_name", "run"]


# Variables


def python(code: str, **env: str) -> str:
    """What a new process with the project's folder on its path prints."""
    code, out, error = start("python", "-c", code, PYTHONPATH=str(ROOT), **env)
    assert code == 0, error
    return out.strip()


@pytest.mark.parametrize("own", [{}, dict.fromkeys(SET, "1")])
def test_variables_are_set_before_pytorch_is_imported_unless_the_user_has_set_them(own):
    shown = "import os, sys, utils; assert 'torch' not in sys.modules"
    shown += f"; print(*map(os.getenv, {[*SET]}))"
    assert python(shown, **own).split() == [*(own or SET).values()]


CREATOR = """
import utils, torch.distributed as dist
dist.Backend._ensure_backend_registered("nccl")  # at the first group over NCCL
print(dist.Backend._plugins["NCCL"].creator_fn.__name__)
"""


@pytest.mark.full
@pytest.mark.skipif(
    not (dist.is_nccl_available() and hasattr(dist.Backend, "_ensure_backend_registered")),
    reason="this build of PyTorch has no NCCL, or only one class for it",
)
@pytest.mark.parametrize(
    ("own", "creator"),
    [
        ({}, "_create_nccl_process_group"),
        full({"TORCH_DIST_USE_NCCL2": "1"}, "_create_nccl2_process_group"),
    ],
)
def test_groups_over_nccl_are_of_the_class_that_does_not_block_the_backward_pass(own, creator):
    assert python(CREATOR, **own) == creator


def nvls_after(flags: list[str], environment: dict) -> tuple[str | None, list[int], int]:
    """NCCL_NVLS_ENABLE at the end of a run; and how many collectives the group of the device had
    begun when kernels were chosen, and at the end of training.
    """
    os.environ |= environment
    choose, update, counts, last = wrapping.choose_kernels, train.train_update, [], [0]

    def begun() -> int:
        return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0

    def watched(*arguments):
        counts.append(begun())
        choose(*arguments)

    def counted(*arguments):
        update(*arguments)
        last[0] = begun()

    wrapping.choose_kernels, train.train_update = watched, counted
    train.main(flags)
    return os.environ.get("NCCL_NVLS_ENABLE"), counts, last[0]


FSDP = variables_of("ACCELERATE_USE_FSDP=true FSDP_VERSION=2")


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "environment", "expected"),
    [
        ("", {}, None),
        ("--deterministic", {}, "0"),
        ("--deterministic", {"NCCL_NVLS_ENABLE": "2"}, "2"),
        full("--deterministic --model mnist_cnn --sync_batchnorm", {}, "0"),
        full("--deterministic", FSDP, "0"),
        full("--deterministic --microbatches 2", {}, "0"),
    ],
)
def test_a_deterministic_run_has_no_sums_in_the_network_from_the_start(more, environment, expected):
    for found, counts, last in returned(2, nvls_after, [*SHORT, *words(more)], environment):
        assert found == expected and counts == [0]
        assert last > 0  # the gradients are added up over this group, so the count means something


def test_the_same_if_only_the_checkpoint_knows_that_the_run_is_deterministic():
    returned(2, train.main, [*SHORT, "--deterministic"])
    again = words("--run_name run --resume auto --max_steps 4")
    for found, counts, last in returned(2, nvls_after, again, {}):
        assert found == "0" and counts == [0] and last > 0


LOST = """
import os, signal, utils
from torch.distributed import TCPStore
reading, writing = os.pipe()
if not (child := os.fork()):  # as a launcher, which serves the store
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    signal.pause()
store = TCPStore("127.0.0.1", int(os.read(reading, 9)), is_master=False)
store.set("key", "")
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
try:
    while True:
        store.check(["key"])
except RuntimeError as error:
    print(type(error).__name__)
"""


@pytest.mark.full
def test_a_lost_store_is_an_error_without_stack_traces_of_cpp_code():
    code, out, error = start("python", "-c", LOST, PYTHONPATH=str(ROOT))
    assert code == 0 and out == "DistNetworkError\n" and error == ""
    more = start("python", "-c", LOST, PYTHONPATH=str(ROOT), TORCH_CPP_LOG_LEVEL="INFO")[2]
    assert "frame #" in more  # the user has asked for it


@pytest.mark.full
def test_after_a_killed_launcher_no_such_trace_is_printed():
    """The ranks are stopped meanwhile, so that their watchdogs ask the lost store first."""
    process = begin("accelerate launch, 2 processes", "--max_steps", "100000")
    log = Path("runs/run/log.jsonl")
    until(lambda: log.exists() and '"train"' in log.read_text())
    ranks = ranks_of(process)
    for rank in ranks:
        rank.suspend()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for rank in ranks:
        rank.resume()
    until(lambda: not any(lives(rank.pid) for rank in ranks))
    printed = Path("out.txt").read_text()
    assert "the launcher has exited" in printed
    assert "frame #" not in printed and "Exception raised from" not in printed


# One process needs no other


@pytest.fixture
def silent():
    """A server that answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def alone(function, flags: list[str], environment: dict[str, str]):
    os.environ |= environment
    return function(flags)


ONE = "WORLD_SIZE=1 RANK=0 LOCAL_RANK=0"
LEFT = "PMI_SIZE=2 PMI_RANK=0"  # of a job step, without the rest
PLACES = {
    "unknown name": f"{ONE} MASTER_ADDR=name.invalid MASTER_PORT=23456",
    "closed port": f"{ONE} MASTER_ADDR=127.0.0.1 MASTER_PORT=CLOSED",
    "silent port": f"{ONE} MASTER_ADDR=127.0.0.1 MASTER_PORT=SILENT",
    "no address": ONE,
    "leftover of MPI": f"{LEFT} MASTER_ADDR=127.0.0.1 MASTER_PORT=SILENT",
    "leftover without an address": LEFT,
}


def place(name: str, silent) -> dict[str, str]:
    text = PLACES[name].replace("CLOSED", str(free_port()))
    return variables_of(text.replace("SILENT", str(silent.getsockname()[1])))


@pytest.mark.full
@pytest.mark.parametrize("name", PLACES)
def test_one_process_trains_without_a_store_whatever_address_the_environment_names(name, silent):
    returned(1, alone, train.main, SHORT, place(name, silent))
    with pytest.raises(BlockingIOError):  # nobody has tried to connect
        silent.accept()


OTHERS = {
    "eval": (evaluation.main, "--ckpt runs/run"),
    "predict": (predict.main, "--ckpt runs/run --out found.csv picture.png"),
    "replay": (replay.main, "--run runs/run --update 2"),
    "doctor": (doctor.main, ""),
}


@pytest.mark.parametrize("script", ["eval", *map(full, ("predict", "replay", "doctor"))])
def test_so_do_the_other_scripts(script, silent):
    function, flags = OTHERS[script]
    returned(1, train.main, SHORT)
    Image.new("RGB", (8, 8)).save("picture.png")
    returned(1, alone, function, words(flags), place("silent port", silent))
    with pytest.raises(BlockingIOError):
        silent.accept()


def under_a_launcher(port: int) -> dict[str, str]:
    text = f"{ONE} LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    return variables_of(f"{text} TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=test")


def test_with_restarts_a_process_looks_for_its_store_until_the_timeout():
    (outcome,) = run_ranks(
        1, alone, train.main, [*SHORT, "--timeout", "1"], under_a_launcher(free_port())
    )
    (line,) = outcome.err.splitlines()
    assert outcome.code == 2 and line.startswith("train.py: error: no answer from 127.0.0.1:")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_that_store(number, silent):
    port = silent.getsockname()[1]
    launch = start_ranks(1, alone, train.main, SHORT, under_a_launcher(port))
    silent.setblocking(True)
    for _ in range(2):  # one connection to see whether anybody listens, and that of the store
        silent.accept()
    launch.kill(number)
    (outcome,) = launch.finish_soon()
    assert outcome.code == (75 if number == signal.SIGTERM else 130)
    assert f"stopped by {number.name} before results were written" in outcome.err
