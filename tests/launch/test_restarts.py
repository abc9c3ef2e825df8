"""--max_restarts: launchers start a run again by themselves, with ranks killed at any moment.

    python -m pytest -m slow -s tests/launch/test_restarts.py

On two machines:  python -m pytest -m machines -s tests/launch/test_restarts.py
"""

import random
import time
from pathlib import Path

import pytest
import torch
from helpers.launched_runs import FLAGS, begin, ranks_of
from helpers.machines import ROOT, needs_machines, network
from helpers.training_runs import steps, weights
from helpers.waiting import PATIENCE, has_logged, until

UPDATES = 1200
FLAGS = [*FLAGS, "--max_steps", str(UPDATES)]
MOMENTS = ("importing", "starting", "training", "saving", "late")


def wait_for(moment, processes, chance):
    """Come back with the rank to kill when that moment is reached, hundreds of updates before the
    end.
    """
    until(lambda: len(processes()) == 2)
    if moment in ("importing", "starting"):  # from PyTorch's import to the first updates
        seconds = chance.uniform(0, 3) if moment == "importing" else chance.uniform(3, 9)
        then, is_training = time.monotonic() + seconds, has_logged(200)
        until(lambda: time.monotonic() > then or is_training())
    elif moment == "saving":
        until(lambda: any(Path("runs/run/checkpoints").glob(".step-*.partial")), every=0.001)
    else:
        first, last = (5, 100) if moment == "training" else (300, 600)
        until(has_logged(chance.randrange(first, last)))
    return chance.choice(processes())


def check(trial, began, moment, victim):
    """All ended well, with the weights of a run that nothing disturbed."""
    starts = steps("run", "start")
    seconds = time.monotonic() - began
    print(f"\n| {trial} | {moment} | {victim} | from updates {starts} | {seconds:.0f} s |")
    assert steps("run", "train") == list(range(1, UPDATES + 1))
    assert all(torch.equal(weights("run")[name], tensor) for name, tensor in whole().items())


def whole(kept={}):  # noqa: B006
    """The weights of the same two ranks without a fault."""
    if not kept:
        process = begin("torchrun, 2 processes", *FLAGS, "--run_name", "whole")
        assert process.wait(timeout=2 * PATIENCE) == 0, Path("out.txt").read_text()[-3000:]
        kept |= weights("whole")
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10))
def test_a_launcher_with_max_restarts_goes_on_after_a_kill_at_any_moment(trial):
    launcher = ("accelerate launch, 2 processes", "torchrun, 2 processes")[trial % 2]
    chance, moment = random.Random(trial), MOMENTS[trial // 2]
    process, began = begin(launcher, *FLAGS, restarts=3), time.monotonic()
    others = lambda: [p for p in ranks_of(process) if p.pid != process.pid]  # noqa: E731
    wait_for(moment, others, chance).kill()
    assert process.wait(timeout=2 * PATIENCE) == 0, Path("out.txt").read_text()[-3000:]
    check(launcher, began, moment, "one rank")


_LAUNCH = ["accelerate", "launch", "--config_file", f"{ROOT}/accelerate_configs/2nodes.yaml"]
RENDEZVOUS = {"static": _LAUNCH, "c10d": [*_LAUNCH, "--rdzv_backend", "c10d"]}


@pytest.mark.machines
@needs_machines
@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
@pytest.mark.parametrize("trial", range(5))
def test_launchers_on_two_machines_go_on_after_a_kill_at_any_moment(tmp_path, rendezvous, trial):
    chance, moment = random.Random(f"{rendezvous} {trial}"), MOMENTS[trial]
    with network(tmp_path) as machines:
        began = time.monotonic()
        victims = lambda: [p for machine in machines for p in machine.processes()]  # noqa: E731
        launcher = [*RENDEZVOUS[rendezvous], "--main_process_ip", machines[0].address]
        command = ["--max_restarts", "3", ROOT / "train.py", *FLAGS, "--threads", "1"]
        jobs = [
            machine.start(*launcher, "--machine_rank", rank, *command)
            for rank, machine in enumerate(machines)
        ]
        victim = wait_for(moment, victims, chance)
        where = "on " + next(machine.name for machine in machines if victim in machine.processes())
        victim.kill()
        codes = [job.wait(2 * PATIENCE) for job in jobs]
        assert codes == [0, 0], "\n=====\n".join(job.text[-5000:] for job in jobs)
    check(rendezvous, began, moment, where)
