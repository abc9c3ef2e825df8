"""Two machines: runs over a real network between them, and what can go wrong with it.

    python -m pytest -m machines tests/launch/test_two_machines.py

The first runs with all others where it can.
"""

import json
import time
from pathlib import Path

import pytest
from helpers.machines import ROOT, needs_machines, network
from helpers.training_runs import records, same_tensors, weights, words
from helpers.waiting import PATIENCE, SOON, has_logged, until

pytestmark = needs_machines
RUN = words("--model mlp --threads 1 --global_batch_size 120 --lr 0.01 --log_every 1")
RUN += words(f"--timeout {PATIENCE} --run_name run")
IMPATIENT = ["--timeout", "15"]  # where a rank is to give up
SHORT = [*RUN, "--max_steps", "30", "--save_every", "10"]
LONG = [*RUN, "--data", "synthetic/10x28x20000", "--eval_every", "100000"]


@pytest.fixture
def machines(tmp_path):
    with network(tmp_path) as both:
        yield both


def start(places, *flags, script="train.py", **env):
    """Start rank 0 on the first machine, rank 1 on the second, as by hand: exported variables and
    plain python.
    """
    return [begin(rank, places, *flags, script=script, **env) for rank in range(len(places))]


def begin(rank, places, *flags, script="train.py", **env):
    here = [number for number, place in enumerate(places) if place is places[rank]]
    numbers = rank, len(places), here.index(rank), len(here)
    names = words("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE")
    variables = dict(zip(names, map(str, numbers), strict=True))
    if "--init_method" not in flags:
        variables |= {"MASTER_ADDR": places[0].name, "MASTER_PORT": "29500"}
    variables |= env
    return places[rank].start("python", ROOT / script, *flags, env=variables)


def ended(jobs, code=0, since=None, within=2 * PATIENCE):
    """Wait until all have ended with that code; returns how long it took."""
    since = since or time.monotonic()
    for job in jobs:
        assert job.wait(max(1.0, within - (time.monotonic() - since))) == code, job.text[-3000:]
    return time.monotonic() - since


def error_of(job):
    """The last line that our program has written as its error."""
    lines = [line for line in job.text.splitlines() if line.startswith("train.py: error: ")]
    assert lines, f"{job.output.name} has no line of an error:\n{job.text[-3000:]}"
    return lines[-1]


def report(fault, seconds, *lines):
    print(f"\n| {fault} | {seconds:.0f} s | " + " / ".join(lines) + " |")


def losses(name="run"):
    return [record["loss"] for record in records(name, "train")]


@pytest.fixture
def one_machine(machines):
    """The losses of the same run of two processes on one machine."""
    a, _ = machines
    ended(start([a, a], *SHORT, "--run_name", "one"))
    return losses("one")


@pytest.mark.full
def test_training_on_two_machines_is_that_on_one_bit_for_bit_and_so_is_evaluation(
    machines, one_machine
):
    ended(start(machines, *SHORT, "--run_name", "whole"))
    assert losses("whole") == one_machine
    assert same_tensors(weights("one"), weights("whole"))
    evaluations = start(machines, "--ckpt", "runs/whole", "--json", "two.json", script="eval.py")
    ended(evaluations)
    ended(start(machines[:1], "--ckpt", "runs/one", "--json", "one.json", script="eval.py"))
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    assert one["count"] == two["count"] == 180 and one["accuracy"] == two["accuracy"]


@pytest.mark.machines
def test_a_run_killed_on_two_machines_goes_on_on_one_with_the_losses_of_a_whole_one(machines):
    flags = [*RUN, "--max_steps", "1000", "--save_every", "10"]
    jobs = start(machines, *flags)
    until(has_logged(15))
    machines[1].processes()[0].kill()
    killed = time.monotonic()
    report("kill -9 of rank 1", ended(jobs[:1], 2, killed, within=SOON), error_of(jobs[0]))
    ended(start([machines[0]] * 2, *flags, "--resume", "auto"))
    ended(start([machines[0]] * 2, *flags, "--run_name", "whole"))
    assert records("run", "start")[-1]["step"] >= 10
    assert losses() == losses("whole")


@pytest.mark.machines
@pytest.mark.parametrize("config", ["2nodes", "nodes"])
def test_accelerate_launch_with_the_config_and_the_number_of_the_machine(
    machines, one_machine, config
):
    flags = ["--num_machines", "2", "--num_processes", "2"] if config == "nodes" else []
    file = ROOT / f"accelerate_configs/{config}.yaml"
    jobs = [
        machine.start("accelerate", "launch", "--config_file", file, *flags, "--machine_rank", rank,
                      "--main_process_ip", machines[0].address, ROOT / "train.py", *SHORT)
        for rank, machine in enumerate(machines)
    ]  # fmt: skip
    ended(jobs)
    assert losses() == one_machine
    assert "No GPU is visible: running on the CPU, 2 processes over gloo" in jobs[0].text


@pytest.mark.machines
def test_an_init_method_is_another_way_to_meet(machines):
    ended(start(machines, *SHORT, "--init_method", f"tcp://{machines[0].address}:29777"))
    assert len(losses()) == 30


@pytest.mark.machines
def test_a_host_name_that_means_loopback_on_its_own_machine_does_no_harm(machines):
    """Debian writes its own name so into /etc/hosts."""
    for machine, other in zip(machines, machines[::-1], strict=True):
        machine.hosts.write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{other.address} {other.name}\n"
        )
    jobs = start(machines, *SHORT)
    ended(jobs)
    assert "gloo on eth0" in jobs[0].text


FAULTS = {
    "an interface that leads elsewhere": (
        {"flags": ["--interface", "docker0"]}, 1,
        "could not connect over gloo, from 172.17.0.1 on interface docker0",
    ),
    "an interface that is not there": (
        {"flags": ["--interface", "eth9"]}, 0,
        "--interface (or GLOO_SOCKET_IFNAME) eth9: has no IP address on ls-a",
    ),
    "the loopback interface": (
        {"GLOO_SOCKET_IFNAME": "lo"}, 1,
        "interface lo is only for ls-b itself, but the run has several machines",
    ),
    "the address of the other machine": (
        {"MASTER_ADDR": "ls-b"}, 0,
        "ls-b does not lead to ls-a, where rank 0 was started; MASTER_ADDR",
    ),
    "a host name that nobody knows": (
        {"MASTER_ADDR": "ls-z"}, 1, "ls-z: ls-b cannot find its address",
    ),
}  # fmt: skip


@pytest.mark.machines
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_setting_ends_all_ranks_with_the_line_that_names_it(machines, fault):
    settings, rank, line = FAULTS[fault]
    settings = dict(settings)
    flags = [*SHORT, *IMPATIENT, *settings.pop("flags", [])]
    began, jobs = time.monotonic(), start(machines, *flags, **settings)
    seconds = ended(jobs, 2, began)
    report(fault, seconds, *(error_of(job) for job in jobs))
    assert line in error_of(jobs[rank])


@pytest.mark.machines
def test_a_port_that_another_program_holds_is_named_with_it_on_both_machines(machines):
    server = machines[0].start("python", "-u", "-m", "http.server", "29500")
    until(lambda: "Serving HTTP" in server.text)
    began, jobs = time.monotonic(), start(machines, *SHORT, *IMPATIENT)
    seconds = ended(jobs, 2, began)
    report("a port that is taken", seconds, *(error_of(job) for job in jobs))
    assert "port 29500 is taken on ls-a" in error_of(jobs[0])
    assert "the process that listens at ls-a:29500 is not rank 0 of this run" in error_of(jobs[1])


@pytest.mark.machines
@pytest.mark.parametrize("missing", [0, 1])
def test_a_machine_that_never_comes_is_named_by_the_other(machines, missing):
    began, job = time.monotonic(), begin(1 - missing, machines, *SHORT, *IMPATIENT)
    seconds = ended([job], 2, began)
    report(f"rank {missing} never comes", seconds, error_of(job))
    lines = "no answer from ls-a:29500 within 15 s", "rank 1 did not connect to ls-a:29500"
    assert lines[missing] in error_of(job)


@pytest.mark.machines
def test_a_firewall_that_passes_the_master_port_only_is_said(machines):
    machines[0].firewall("tcp dport != 29500 drop")
    machines[1].firewall("tcp sport != 29500 drop")
    began, jobs = time.monotonic(), start(machines, *SHORT, "--timeout", str(SOON))
    seconds = ended(jobs, 2, began)
    report("only the master port is open", seconds, *(error_of(job) for job in jobs))
    assert "could not connect over gloo, from 10.77.0.1 on interface eth0" in error_of(jobs[0])
    assert "whether a firewall is between the machines" in error_of(jobs[1])


@pytest.mark.machines
@pytest.mark.parametrize("how", ["cut", "black hole"])
def test_a_link_lost_for_good_ends_both_machines_after_the_timeout(machines, how):
    jobs = start(machines, *LONG, "--timeout", "20", "--max_steps", "100000")
    until(has_logged(20))
    lost = time.monotonic()
    machines[1].cut() if how == "cut" else machines[1].firewall("drop")
    seconds = ended(jobs, 2, lost)
    report(f"link lost: {how}", seconds, *(error_of(job) for job in jobs))
    assert 10 < seconds < 20 + SOON
    line = error_of(jobs[0])
    assert "waited for rank 1 (ls-b, process" in line and "silent for" in line
    assert "another process of this run exited or stopped answering" in error_of(jobs[1])


@pytest.mark.machines
def test_a_link_cut_for_8_seconds_costs_8_seconds(machines):
    # TCP doubles the time from one try to the next, so that the first after those 8 s comes before
    # 17 s have passed.
    jobs = start(machines, *LONG, "--max_steps", "600", "--timeout", "50")
    until(has_logged(20))
    lost = time.monotonic()
    machines[1].cut()
    time.sleep(8)
    machines[1].heal()
    seconds = ended(jobs, since=lost)
    said = [
        line for line in jobs[0].text.splitlines() if line.startswith("train.py: rank 0 has waited")
    ]
    report("link cut for 8 s", seconds, *said)
    assert "for rank 1 (ls-b, process" in said[0] and len(losses()) == 600


@pytest.mark.machines
def test_a_fifth_of_all_packets_lost_makes_a_run_slow_and_does_not_end_it(machines):
    """TCP sends a packet again after 0.2 s or a little more, then after twice as long each time,
    two minutes at most.

    Linux gives a connection up after 15 tries more, a quarter of an hour later, and --timeout is
    longer than that. A try fails when the packet or its receipt is lost, with a chance of 0.36, and
    all 16 with one of 8e-8. An update has some 20 packets that wait so (none after them tells of
    the loss sooner): this fails by chance once in 10,000 times. Gloo gives up much sooner while it
    connects, so packets are lost only after that.
    """
    flags = [*RUN, "--max_steps", "60", "--timeout", "3600", "--save_every", "20"]
    ended(start([machines[0]] * 2, *flags, "--run_name", "one"))
    jobs, began = start(machines, *flags), time.monotonic()
    until(has_logged(1))
    machines[1].cut()  # the run waits until the rules are there
    for machine in machines:
        machine.firewall("numgen random mod 100 < 20 counter drop")
    machines[1].heal()
    ended(jobs, within=7200)
    lost = [machine.dropped() for machine in machines]
    report("20 % of the packets lost each way", time.monotonic() - began, f"{lost} packets lost")
    assert losses() == losses("one") and min(lost) > 20
