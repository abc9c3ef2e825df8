"""accelerate launch and plain Python make one run, or one clear error."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from helpers.environments import topology_of
from helpers.training_runs import ROOT, launch, records, start, train_run, words, working_in
from helpers.waiting import error_lines

from utils.launch.environment import Topology, threads_per_process
from utils.ranks.ranks import Ranks
from utils.settings.ranks import LaunchConfig

FLAGS = words("--model mlp --max_steps 3 --log_every 1 --lr 0.01 --global_batch_size 120")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A folder with the run `plain` of one process and the run `2gpu`, and the latter's output."""
    folder = tmp_path_factory.mktemp("launched")
    with working_in(folder):
        train_run(1, "plain", *FLAGS)
        code, out, err = launch(
            "2gpu", "train.py", "--run_name", "2gpu", *FLAGS, CUDA_VISIBLE_DEVICES=""
        )
    assert code == 0, err[-2000:]
    return folder, out


def check_same_run(name: str, out: str, processes: int) -> None:
    """It is one run, not several side by side, with the losses of one process."""
    assert records(name, "start")[0]["processes"] == processes and out.count("Done") == 1
    losses, expected = (
        [record["loss"] for record in records(run, "train")] for run in (name, "plain")
    )
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_multi_gpu_config_without_gpus_is_the_same_run_on_the_cpu_and_says_so(
    launched, monkeypatch
):
    folder, out = launched
    monkeypatch.chdir(folder)
    check_same_run("2gpu", out, processes=2)
    assert "No GPU" in out and "gloo" in out


@pytest.mark.full
def test_two_processes_from_a_launcher_evaluate_as_one(launched):
    folder, _ = launched
    code, out, err = launch("2cpu", "eval.py", "--ckpt", folder / "runs/2gpu", "--json", "two.json")
    assert code == 0, err[-2000:]
    assert json.loads(Path("two.json").read_text())["count"] == 180 and out.count("macro_f1") == 1


@pytest.mark.full
@pytest.mark.parametrize(("config", "processes"), [("2cpu", 2), ("cpu", 1), ("python", 1)])
def test_accelerate_launch_and_python_are_the_same_run(config, processes, launched, monkeypatch):
    monkeypatch.chdir(launched[0])
    flags = ("--run_name", config, *FLAGS)
    how = (
        start("python", ROOT / "train.py", *flags)
        if config == "python"
        else launch(config, "train.py", *flags)
    )
    assert how[0] == 0, how[2][-2000:]
    check_same_run(config, how[1], processes)


@pytest.mark.full
def test_processes_that_accelerate_would_not_start_are_an_error_not_a_single_run():
    command = ("accelerate", "launch", "--cpu", "--num_processes", "2", ROOT / "train.py", *FLAGS)
    code, _out, err = start(*command)
    assert code != 0 and "accelerate started one" in err and "2cpu.yaml" in err
    assert not Path("runs").exists()


@pytest.mark.full
def test_an_error_under_a_launcher_is_one_line_of_ours():
    code, _out, err = launch("2cpu", "train.py", "--lr", "x")
    assert code != 0
    line = "train.py: error: --lr must be a number, got x"
    assert error_lines(err) == [line]
    assert f" : {line}\n" in err  # in the launcher's table of failures


@pytest.mark.parametrize("name", ["cpu", "2cpu", "1gpu", "2gpu", "4gpu", "8gpu", "2nodes", "nodes"])
def test_configs_hold_only_keys_that_the_launcher_honours(name):
    config = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text())
    number = name.strip("cgpunodes")
    assert config["num_processes"] == int(number or (32 if name == "nodes" else 1))
    honoured = words("compute_environment distributed_type num_machines num_processes gpu_ids")
    assert set(config) - set(honoured) <= {"main_process_port", "use_cpu"}
    # `use_cpu` reaches a single process only, and a port is of no use to one
    assert ("use_cpu" in config) == (name == "cpu")
    assert ("main_process_port" in config) == (config["distributed_type"] == "MULTI_GPU")


def test_topology_is_read_from_the_launchers_variables():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert topology_of(env) == Topology(3, 4, 1, 2, "127.0.0.1", 29500, "the environment")
    assert topology_of({}) == Topology(0, 1, 0, 1)
    del env["LOCAL_WORLD_SIZE"]
    assert topology_of(env).local_world_size == 4


def test_a_single_process_gets_all_cores_though_its_launcher_exports_one_thread(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("utils.memory.CONTAINER", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_process(Topology()) == 1  # the user's own wish
    for given in ("64", "9" * 30):  # as a profile of a cluster may set it for larger machines
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert threads_per_process(Topology()) == len(os.sched_getaffinity(0))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # accelerate's single-process launcher
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(Topology()) == cores
    assert threads_per_process(Topology(0, 2, 0, 2)) == max(1, cores // 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for quota, cores in (("350000 100000", 3), ("50000 100000", 1), ("max 100000", 8)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")  # of a container
        assert threads_per_process(Topology()) == cores
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")  # of which this task has those that it may use
    assert threads_per_process(Topology(0, 8, 0, 8, source="SLURM")) == cores
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert threads_per_process(Topology(0, 8, 0, 8, source="SLURM")) == 1


def _device_of(topology: Topology, monkeypatch, gpus: int, **launch) -> tuple[str, str]:
    """The device and backend of a rank on a machine that says it has so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    # for good, in the tests' own process
    monkeypatch.setattr("utils.ranks.ranks.keep_freed_memory", lambda: None)
    ranks = Ranks(topology, LaunchConfig(threads=1, **launch))
    return str(ranks.device), ranks.backend


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_its_task_sees(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    by_torchrun = Topology(1, 2, 1, 2, "127.0.0.1", 29500, "the environment")
    by_srun = Topology(1, 2, 1, 2, "127.0.0.1", 29500, "SLURM")
    assert _device_of(by_torchrun, monkeypatch, 2) == ("cuda:1", "nccl")
    assert _device_of(by_srun, monkeypatch, 2) == ("cuda:1", "nccl")
    assert _device_of(by_srun, monkeypatch, 1) == ("cuda:0", "nccl")  # --gpus-per-task 1
    assert _device_of(by_torchrun, monkeypatch, 2, backend="gloo") == ("cuda:1", "gloo")
    assert _device_of(by_torchrun, monkeypatch, 2, cpu=True) == ("cpu", "gloo")
    assert _device_of(by_torchrun, monkeypatch, 0) == ("cpu", "gloo")
    with pytest.raises(ValueError, match="2 processes on this machine, but 1 GPU"):
        _device_of(by_torchrun, monkeypatch, 1)
    with pytest.raises(ValueError, match="--backend nccl needs GPUs"):
        _device_of(by_torchrun, monkeypatch, 0, backend="nccl")
    for visible in ("1", "MIG-3ca2a69a"):  # by a wrapper that gives each process its own
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        assert _device_of(by_torchrun, monkeypatch, 1, backend="gloo") == ("cuda:0", "gloo")
