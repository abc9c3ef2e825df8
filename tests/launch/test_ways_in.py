"""Launchers and meeting places: each way to start two ranks is one run with the same losses."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
from helpers.environments import topology_of, variables_of
from helpers.ranks import Outcome, free_port, run_ranks
from helpers.training_runs import ROOT, full, records, train_run, words, working_in
from helpers.waiting import PATIENCE, error_lines

import train
from utils.launch import rendezvous
from utils.launch.address import first_node
from utils.launch.environment import Topology

TRAIN = str(ROOT / "train.py")
FLAGS = words("--model mlp --global_batch_size 120 --max_steps 5 --log_every 1 --threads 1")
FLAGS += words(f"--lr 0.01 --timeout {PATIENCE} --report false")
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHELL = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # what both shells export


def losses(name: str) -> list[float]:
    return [record["loss"] for record in records(name, "train")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of one process."""
    with working_in(tmp_path_factory.mktemp("plain")):
        train_run(1, "plain", *FLAGS)
        return pytest.approx(losses("plain"), rel=1e-5)


def train_with(flags: list[str], *exported: dict[str, str]) -> None:
    """Train with just these of a launcher's variables; there is a dictionary for each rank."""
    variables = exported[int(os.environ.get("RANK", 0))]
    for name in OWN:
        os.environ.pop(name, None)
    os.environ |= variables
    train.main([*FLAGS, *flags])


def by_hand(*flags: str, **more: str) -> list[Outcome]:
    """Two processes with variables exported as in two shells."""
    exported = [SHELL | {"RANK": rank, "LOCAL_RANK": rank} | more for rank in "01"]
    return run_ranks(2, train_with, ["--run_name", "run", *flags], *exported)


def check_run(outcomes: list[Outcome], expected) -> None:
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err
    assert records("run", "start")[0]["processes"] == 2 and losses("run") == expected


WAYS = {
    "torchrun": words("torchrun --nproc_per_node 2 --master_port {port} {train}"),
    "Open MPI": words("mpirun.openmpi --allow-run-as-root --oversubscribe -n 2 {python} {train}"),
    "MPICH": words("mpiexec.hydra -n 2 {python} {train}"),
    "mp.spawn as in docs/launching.md": ["{python}", "spawn.py"],
    "torch.distributed.launch": words(
        "{python} -m torch.distributed.launch --nproc_per_node 2 --master_port {port} {train}"
    ),
}
QUICK = "Open MPI"  # torchrun is in test_launch_faults.py too; the others differ little


@pytest.mark.parametrize("way", [QUICK, *(full(way) for way in WAYS if way != QUICK)])
def test_a_launcher_starts_the_same_run(way, expected):
    port = str(free_port())
    command = [word.format(port=port, python=sys.executable, train=TRAIN) for word in WAYS[way]]
    program = Path(sys.executable).parent / command[0]
    command[0] = str(program) if program.exists() else command[0]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    (script,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/launching.md").read_text(), re.M | re.S
    )
    Path("spawn.py").write_text(script.replace("29500", port))
    env = {name: value for name, value in os.environ.items() if name not in OWN}
    env |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *FLAGS, "--run_name", "run"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("rank 1 ") == 1 and losses("run") == expected


def test_variables_exported_by_hand_start_the_same_run(expected):
    check_run(by_hand(MASTER_ADDR="localhost", MASTER_PORT=str(free_port())), expected)


def test_an_init_method_starts_the_same_run(expected):
    check_run(by_hand("--init_method", f"tcp://localhost:{free_port()}"), expected)


def test_what_one_shell_alone_forgot_is_named_in_that_shell():
    forgetful = variables_of("MASTER_ADDR=localhost WORLD_SIZE=2 RANK=1 LOCAL_RANK=1")
    (done,) = run_ranks(1, train_with, [], forgetful)
    (line,) = error_lines(done.err)
    assert done.code == 2 and line.startswith("train.py: error: rank 1 on ")
    assert "MASTER_PORT is not set" in line


def test_processes_of_one_machine_that_count_as_several_learn_what_to_export():
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for done in by_hand(**where, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0"):
        assert done.code == 2 and "export LOCAL_WORLD_SIZE=WORLD_SIZE, and" in done.err


def launch_by_a_function(port):
    accelerate.notebook_launcher(
        train.main, ([*FLAGS, "--run_name", "run"],), num_processes=2, use_port=str(port)
    )


@pytest.mark.full
def test_accelerates_notebook_launcher_starts_the_same_run(expected):
    check_run(run_ranks(1, launch_by_a_function, free_port()), expected)


SLURM = variables_of(
    "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_JOB_ID=1234 "
    "SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=n[007-008]"
)
MPI = variables_of(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=12345"
)


def test_slurms_variables_tell_rank_machine_and_meeting_point():
    found = topology_of(SLURM)
    assert found == Topology(2, 4, 0, 2, "n007", found.port, "SLURM")
    assert 10_000 <= found.port < 30_000
    # another task of an array
    assert topology_of(SLURM | {"SLURM_JOB_ID": "1235"}).port != found.port
    own = variables_of("MASTER_ADDR=10.0.0.9 MASTER_PORT=4000")
    assert topology_of(SLURM | own).address == "10.0.0.9"
    one = SLURM | variables_of("SLURM_STEP_TASKS_PER_NODE=4 SLURM_NODEID=0 SLURM_LOCALID=2")
    assert (topology_of(one).address, topology_of(one).local_world_size) == ("127.0.0.1", 4)
    # The script of a job, and a launcher that srun has started once on each machine.
    script = variables_of("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=1")
    assert topology_of(script) == Topology()
    inside = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1"
    assert topology_of(SLURM | variables_of(inside)).rank == 1


def test_mpis_variables_tell_rank_and_meeting_point():
    found = topology_of(MPI)
    assert found == Topology(1, 2, 1, 2, "127.0.0.1", found.port, "Open MPI")
    assert topology_of(MPI | {"PMIX_NAMESPACE": "12346"}).port != found.port
    hydra = variables_of("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2")
    # MPICH does not name jobs
    assert topology_of(hydra) == Topology(0, 2, 0, 2, "127.0.0.1", 29500, "MPICH")
    assert topology_of(variables_of("PMI_RANK=0 PMI_SIZE=2")) == Topology()


@pytest.mark.parametrize(
    "nodes, first", [("n[007-009,12],m1", "n007"), ("a,b", "a"), ("r[1-2]n[3,5]-x,q", "r1n3-x")]
)
def test_the_first_of_slurms_nodes_is_found(nodes, first):
    assert first_node(nodes) == first


ONE = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0"


@pytest.mark.parametrize(
    "env, text",
    [
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE=2(x2) has no node 2"),
        (
            MPI | variables_of("OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0"),
            "mpirun -x MASTER_ADDR=HOST",
        ),
        (variables_of(f"{ONE} MASTER_ADDR=a MASTER_PORT=1"), "LOCAL_WORLD_SIZE is not set"),
        (
            variables_of("RANK=1 WORLD_SIZE=2"),
            "LOCAL_RANK not set although RANK=1 and WORLD_SIZE=2",
        ),
        (variables_of("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0"), "contradictory environment: RANK=2"),
        (variables_of("RANK=zero WORLD_SIZE=2 LOCAL_RANK=0"), "RANK='zero' is not an integer"),
        (variables_of("ACCELERATE_MIXED_PRECISION=no MASTER_ADDR=a"), "accelerate started one"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not supported"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(env, text):
    with pytest.raises(ValueError) as refusal:
        topology_of(env)
    assert text in str(refusal.value)


def test_an_address_that_is_translated_leads_here_as_far_as_can_be_seen(monkeypatch):
    # as a cloud's outer address
    monkeypatch.setattr(rendezvous, "is_own_address", lambda address: False)
    with socket.create_server(("", 0)) as holder:
        # taken: nothing can be seen
        assert rendezvous.leads_to_this_machine("127.0.0.1", holder.getsockname()[1])
    assert rendezvous.leads_to_this_machine("127.0.0.1", free_port())
