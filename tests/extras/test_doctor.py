"""doctor.py: a healthy launch is green, and each planted fault turns its own line red."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from helpers.environments import variables_of
from helpers.machines import needs_machines, network
from helpers.ranks import returned, run_ranks, start_ranks
from helpers.training_runs import codes, launch
from helpers.waiting import PATIENCE, SOON, has_ended, until

import doctor
from extras.doctor import machine as host_checks
from extras.doctor import processes as health
from extras.doctor.findings import Finding, merge
from utils.ranks.session import distributed_session
from utils.settings.scripts import DoctorConfig

BUSY = ["--slow", "1e-6"]  # the tests' machine may have other work to do


def findings(file="doctor.json"):
    return {finding["name"]: finding for finding in json.loads(Path(file).read_text())["findings"]}


def red_lines(file="doctor.json"):
    """The names of what is red.

    Runs of others on this machine, which may have lost their launchers, do not count.
    """
    red = {name for name, finding in findings(file).items() if finding["ok"] is False}
    return red - {"leftovers"}


def examine(plant, flags):
    """Plant a fault in this rank, and look."""
    health._SIZES = {"4 KB": 2**12, "64 KB": 2**16}
    rank = int(os.environ.get("RANK", 0))
    more = plant(rank) if plant else None
    doctor.main([*flags, *(more or [])])


def look(processes, plant=None, *flags):
    return run_ranks(processes, examine, plant, ["--json", "doctor.json", *BUSY, *flags])


@pytest.mark.full
def test_a_healthy_launch_of_two_processes_is_green():
    code, out, err = launch("2cpu", "doctor.py", "--json", "doctor.json", *BUSY)
    assert red_lines() == set(), out + err
    if findings()["leftovers"]["ok"]:
        assert code == 0 and "healthy: all" in out
    assert out.count("Lockstep doctor  2 processes on 1 machine") == 1 and "\033" not in out
    assert not Path("runs").exists()  # it leaves nothing behind


@pytest.mark.parametrize("processes", [1, 2])
def test_forked_ranks_are_green(processes):
    outcomes = look(processes)
    assert red_lines() == set(), outcomes[0].out + outcomes[0].err
    assert all(outcome.out == "" for outcome in outcomes[1:])
    names = set(findings())
    assert {"launch", "machine", "versions", "gradients"} <= names
    assert (
        names >= {"folder", "all-reduce"} if processes > 1 else not names & {"folder", "all-reduce"}
    )


# Faults: what each rank does to itself, which may return flags.


def another_folder(rank):
    Path(f"runs-{rank}").mkdir()
    return ["--output_dir", f"runs-{rank}"]


def other_code(rank):
    health.code_hash = lambda: f"{rank}" * 12


def no_memory(rank):
    host_checks.free_memory = lambda: (10**8, 10**10)


def unshared_gradients(rank):
    Accelerator.prepare = lambda self, *parts: parts


def several_gpus_less(rank):
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1


def environment(**variables):
    return lambda rank: os.environ.update(variables) or ["--timeout", "3"]


def flags(*words):
    return lambda rank: words


# Each case: processes, the fault, the red line, and what it and its fix say.
FAULTS = [
    (2, another_folder, "folder", "seen by rank 1 in runs-0", "a disk that they share"),
    (2, other_code, "versions", "code 111111111111 on rank 1", "copy the same code"),
    (2, no_memory, "memory", "0.1 of 10.0 GB free", "start fewer processes"),
    (2, unshared_gradients, "gradients", "differ from those of one process", "another --backend"),
    (2, flags("--slow", "1000"), "all-reduce", ", GB/s: ", "check --interface"),
    (1, flags("--output_dir", "/proc/nope"), "disk", "0.0 GB free for ", "delete old runs"),
    (2, several_gpus_less, "launch", "2 processes on this machine, but 1 GPU", "--num_processes 1"),
    (2, flags("--backend", "nccl"), "launch", "--backend nccl needs GPUs", "leave it out"),
    (2, flags("--interface", "nope0"), "connection", "nope0: has no IP address", "to one of"),
    (2, environment(MASTER_ADDR="no.invalid"), "connection", "cannot find its address", "/etc/"),
    (2, environment(MASTER_ADDR="192.0.2.7"), "connection", "192.0.2.7 does not lead to ", "must"),
]
WITHOUT_RANK = environment(RANK="0", WORLD_SIZE="2")
FAULTS.append((1, WITHOUT_RANK, "launch", "LOCAL_RANK not set although RANK=0", "export all of"))


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_own_line_red_and_says_what_to_do(fault):
    processes, plant, name, value, fix = fault
    first, *others = look(processes, plant)
    assert first.code == 1 and red_lines() == {name}, first.out + first.err
    assert value in findings()[name]["value"] and fix in findings()[name]["fix"], first.out
    assert {"leftovers", "memory", "disk"} <= set(findings())  # what needs no other process
    assert f"{name} " in first.out and "✗" in first.out and "→" in first.out
    assert not list(Path().rglob(".doctor-*"))
    if name not in ("launch", "connection"):  # else each machine prints its own table
        assert all((other.code, other.out, other.err) == (1, "", "") for other in others)


@pytest.mark.full
def test_a_taken_port_is_named_before_the_processes_meet():
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 0))"
    listen += "; print(s.getsockname()[1], flush=True)"
    command = [sys.executable, "-c", f"{listen}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        port = holder.stdout.readline().strip()
        outcomes = look(2, environment(MASTER_PORT=port))
        holder.kill()
    assert outcomes[0].code == 1 and red_lines() == {"connection"}
    found = findings()["connection"]
    assert f"port {port} is taken on " in found["value"]
    assert all(text in found["fix"] for text in ("another MASTER_PORT", "two have RANK=0"))
    assert "the processes are not connected" in outcomes[0].out


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named():
    def absent(rank):
        if rank == 1:
            raise SystemExit(0)
        return ["--timeout", "2"]

    outcomes = look(2, absent)
    assert outcomes[0].code == 1 and red_lines() == {"connection"}
    assert "rank 1 did not connect to 127.0.0.1:" in findings()["connection"]["value"]


@pytest.mark.full
def test_ranks_that_meet_and_cannot_connect_find_it_in_the_table():
    def silent(rank):  # as gloo is where a firewall lets nothing but the meeting point through
        torch.distributed.init_process_group = lambda *arguments, **more: time.sleep(600)
        return ["--timeout", "3"]

    begun = time.monotonic()
    outcomes = look(2, silent)
    assert time.monotonic() - begun < SOON
    assert codes(outcomes) == [1, 1] and red_lines() == {"connection"}
    assert (
        "could not connect over gloo" in findings()["connection"]["value"]
        and findings()["memory"]["ok"]
    )


ACCIDENTS = {  # what rank 1 does in the middle of a check, --timeout, and what the table says
    "exits": (lambda *_: os._exit(9), PATIENCE, "exited or stopped answering"),
    "fails": (lambda *_: int("planted"), PATIENCE, "rank 1, checking all-reduce: invalid literal"),
    "hangs": (lambda *_: time.sleep(600), 4, ""),
}


@pytest.mark.full
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_what_was_found_is_printed_when_a_rank_exits_fails_or_hangs_meanwhile(accident):
    act, timeout, text = ACCIDENTS[accident]

    def plant(rank):
        if rank == 1:
            health.bandwidth = act

    begun = time.monotonic()
    started = start_ranks(2, examine, plant, ["--json", "doctor.json", "--timeout", str(timeout)])
    until(lambda: has_ended(started.pids[0]))
    assert time.monotonic() - begun < PATIENCE / 2
    if accident == "hangs":
        started.kill()
    own_line = started.finish()[1].err
    assert red_lines() == {"all-reduce"} and findings()["versions"]["ok"]
    assert text in findings()["all-reduce"]["value"] + own_line


# Leftovers are real processes.


@pytest.fixture
def training(tmp_path):
    """Start a script of that name that sleeps, under a shell that stays or leaves; all are ended
    afterwards.
    """
    scripts, shells = [], []

    def start(name, stays, **env):
        script = tmp_path / name
        script.write_text("import time\ntime.sleep(600)\n")
        end = "wait" if stays else "true"
        command = f"{sys.executable} {script} & echo $!; {end}"
        words, env = ["sh", "-c", command, "torchrun", str(script)], os.environ | env
        shells.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
        scripts.append(psutil.Process(int(shells[-1].stdout.readline())))
        # until then it is a copy of the shell
        until(lambda: scripts[-1].cmdline()[1:] == [str(script)])
        if not stays:
            shells[-1].wait()
        return scripts[-1].pid

    yield start
    for script in scripts:
        with suppress(psutil.NoSuchProcess):
            script.kill()
    for shell in shells:
        shell.communicate()


def test_a_rank_whose_launcher_is_gone_is_left_over_and_not_touched(training):
    lost = training("train.py", stays=False, TORCHELASTIC_RUN_ID="none")
    child = training("eval.py", False)
    kept = training("train.py", stays=True, TORCHELASTIC_RUN_ID="none")
    found = host_checks.check_leftovers()
    assert {lost, child, kept} & {*found.numbers["processes"]} == {lost}
    assert found.red and f"process {lost} (train.py): its launcher has exited" in found.value
    assert f" {lost}" in found.fix and psutil.pid_exists(lost)
    outcomes = look(1)
    assert outcomes[0].code == 1 and str(lost) in findings()["leftovers"]["value"]


def test_a_file_that_cannot_be_written_is_one_line_after_the_table():
    (outcome,) = look(1, None, "--json", "nope/doctor.json")
    assert outcome.code == 2 and "Lockstep doctor" in outcome.out
    assert outcome.err.startswith("doctor.py: error: --json nope/") and outcome.err.count("\n") == 1


def test_red_lines_of_other_ranks_name_the_rank():
    assert returned(3, _merge)[0] == ["mine", "rank 2 on b: small"]


def _merge():
    rank = int(os.environ["RANK"])
    finding = Finding("disk", "mine" if rank < 2 else "small", rank < 2)
    with distributed_session("doctor.py", DoctorConfig(timeout=20)) as ranks:
        ranks.join()
        socket.gethostname = lambda: "ab"[rank // 2]
        return [line.value for line in merge(ranks, [finding])]


def test_gpus_of_a_machine_are_one_line_with_the_least_memory_free():
    common = {"host": "n1", "kind": "H200", "memory": (9e10, 1e11)}
    gpus = [
        common | {"device": f"cuda:{n}", "gpu_memory": (1.3e11 + n * 1e9, 1.5e11)} for n in range(8)
    ]  # as ranks with GPUs report; no GPU is asked
    (line,) = health.machines(gpus)
    assert line.value.split("\n") == [
        "n1: ranks 0, 1, 2, 3, 4, 5, 6, 7, 90.0 of 100.0 GB memory free",
        "8 x H200 (cuda:0 to cuda:7), at least 130.0 of 150.0 GB free",
    ]


# Two machines of a network:  python -m pytest -m machines tests/extras/test_doctor.py


def by_hand(places, *flags_of_each):
    """Start one process on each machine with exported variables; returns their codes and what they
    wrote.
    """
    jobs = []
    for rank, (place, flags) in enumerate(zip(places, flags_of_each, strict=True)):
        where = f"MASTER_ADDR={places[0].name} MASTER_PORT=29500 RANK={rank}"
        env = variables_of(f"{where} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")
        script = doctor.__file__
        jobs.append(place.start("python", script, "--json", "doctor.json", *flags, env=env))
    return [job.wait(PATIENCE) for job in jobs], [job.text for job in jobs]


@pytest.mark.machines
@needs_machines
def test_two_machines_are_green_over_their_network_and_red_over_folders_of_their_own(tmp_path):
    with network(tmp_path) as places:
        a, b = places
        codes, texts = by_hand(places, [], [])
        assert red_lines() == set() and "Lockstep doctor" not in texts[1], texts
        assert (
            f"gloo over eth0 ({a.address}), eth0 ({b.address})" in texts[0]
            and "2 machines" in texts[0]
        )
        assert codes == [0, 0] or not findings()["leftovers"]["ok"]
        by_hand(places, ["--output_dir", "runs-a"], ["--output_dir", "runs-b"])
        assert red_lines() == {"folder"}
