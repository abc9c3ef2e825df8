"""torchrun --nnodes MIN:MAX: machines come and go.

    python -m pytest -m slow -s tests/launch/test_elastic.py

Between network namespaces, as root:  python -m pytest -m machines -s tests/launch/test_elastic.py
"""

import os
import random
import time
from functools import cache
from pathlib import Path

import pytest
from helpers.elastic import (
    BETWEEN_MACHINES,
    EVENTS,
    TIMEOUT,
    Launchers,
    possible,
    wait_for_progress,
)
from helpers.environments import variables_of
from helpers.machines import needs_machines, network
from helpers.ranks import free_port, returned
from helpers.training_runs import records, steps, train_run, words
from helpers.waiting import PATIENCE, records_so_far, until

import train
from utils.files import lock
from utils.launch import command
from utils.launch.command import is_elastic
from utils.runs.manifest import sha256_of

# Batch statistics, dropout, mixing and an average; about 0.1 s an update
FLAGS = words("--data digits --image_size 32 --model timm/test_resnet")
FLAGS += ["--model_args", "{drop_rate: 0.2}"]
FLAGS += words("--global_batch_size 96 --microbatches 4 --lr 0.02 --mixup 0.2 --ema_decay 0.95")
FLAGS += words("--threads 1 --log_every 1 --save_every 10 --eval_every 1000 --report false")
FLAGS += ["--timeout", str(TIMEOUT)]


ENDS = ("store lost", "all machines lost")  # events that end a run
LOG = Path("runs/run/log.jsonl")


@cache
def whole(updates: int) -> dict[str, str]:
    """The SHA-256 of the final files of an uninterrupted run on one process."""
    train_run(1, "whole", *FLAGS, "--max_steps", str(updates))
    return hashes("whole", updates)


def hashes(name: str, updates: int) -> dict[str, str]:
    folder = Path(f"runs/{name}/checkpoints/step-{updates:08}")
    names = "model.safetensors", "optimizer.bin", "ema.safetensors"
    return {name: sha256_of(folder / name) for name in names}


def logged() -> int:
    """The last update in the log."""
    return max((r["step"] for r in records_so_far(LOG) if r["kind"] == "train"), default=0)


def check_events(
    updates: int, events: list[str], seed: int, served: bool = True, machines=None
) -> None:
    """Train while launchers come and go; the run must end with the bits of one process, and log
    each update once.
    """
    expected, chance = whole(updates), random.Random(seed)
    flags = [*FLAGS, "--max_steps", str(updates), *words("--run_name run --resume auto")]
    launchers = Launchers(flags, served, machines)
    try:
        launchers.start()
        after = 0  # records of the log before the last event
        for number, event in enumerate(events):
            began, before = time.monotonic(), logged()
            # the processes may be importing, connecting or saving
            if number and chance.random() < 0.3:
                time.sleep(chance.uniform(0, 8))
            else:
                wait_for_progress(LOG, after, chance.randint(2, 15), launchers)
            assert logged() < updates, "the run has ended before all events"
            codes = launchers.reap()
            if not launchers.alive:  # a scheduler starts the run again, with the same command
                launchers.start()
            if not possible(event, launchers):
                event = "launcher added" if len(launchers.alive) == 1 else "rank killed"
            after = len(records_so_far(LOG))
            launchers.happen(event, chance)
            if event in ENDS:  # all launchers exit, and the next start continues
                until(lambda: launchers.reap() is not None and not launchers.alive)
                if served:
                    launchers.start_store()
                launchers.start()
            seconds, left = time.monotonic() - began, len(launchers.alive)
            print(
                f"| {seed}.{number} | {event} | from {before} to {logged()} | {left} | {codes} "
                f"| {seconds:.0f} s |"
            )
        codes = []
        until(lambda: codes.extend(launchers.reap()) or not launchers.alive, PATIENCE * 2)
        assert set(codes) == {0}, [output.read_text()[-2000:] for output in launchers.outputs]
    finally:
        launchers.end()
    found = [(record["processes"], record["step"]) for record in records("run", "start")]
    print(f"| {seed} | processes and first update of each start: {found} |")
    assert steps("run", "train") == [*range(1, updates + 1)], launchers.outputs
    assert hashes("run", updates) == expected


NAMED = words("--run_name run --resume auto")


def test_only_a_run_whose_number_of_machines_may_change_is_elastic(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1:3")
    assert not is_elastic(), "no launcher has started this process"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for nodes in ("", "2"):
        monkeypatch.setenv("PET_NNODES", nodes)
        assert not is_elastic()
    monkeypatch.setenv("PET_NNODES", "1:4")
    for flag in ("--nnodes=2:5", "--nnodes 2"):
        given = ["torchrun", *words(flag)]
        monkeypatch.setattr(command, "launcher_words", lambda given=given: given)
        assert is_elastic() == (flag == "--nnodes=2:5")


@pytest.mark.full
def test_the_only_process_of_a_launcher_ends_with_the_bits_of_plain_python():
    def launched(flags: list[str]) -> None:
        where = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1"
        os.environ |= variables_of(f"{where} MASTER_PORT={free_port()}")
        train.main(flags)

    flags = [*FLAGS, *words("--max_train_samples 192 --max_eval_samples 8 --max_steps 3")]
    train_run(1, "whole", *flags)
    returned(1, launched, ["--run_name", "run", *flags])
    assert hashes("run", 3) == hashes("whole", 3)


@pytest.mark.full
def test_ranks_do_not_wait_for_one_whose_launcher_was_killed():
    """An orphan reports that it has finished, if rank 0 serves the store.

    Else rank 0 would wait for ten seconds.
    """

    def orphan(flags: list[str]) -> float:
        rank = int(os.environ["RANK"])
        finish, seconds = train.Ranks.finish, []

        def timed(ranks):
            ranks._launcher = -1 if rank == 1 else None  # another process than the parent
            began = time.monotonic()
            finish(ranks)
            seconds.append(time.monotonic() - began)

        train.Ranks.finish = timed
        train.main(flags)
        return seconds[0]

    flags = words("--run_name run --max_steps 1 --max_train_samples 96 --max_eval_samples 8")
    assert max(returned(2, orphan, [*FLAGS, *flags])) < 9


@pytest.mark.full
def test_a_wrong_setting_ends_the_launcher_at_once_and_the_fixed_command_runs():
    """torchrun would use all its restarts, then close the file for the next start."""
    flags = [*FLAGS, *NAMED, "--max_steps", "2"]
    for wrong in (["--lr", "-1"], []):
        launchers = Launchers([*flags, *wrong], served=False)
        try:
            launchers.start()
            launcher = launchers.alive[1]
            until(lambda launcher=launcher: launcher.poll() is not None)
        finally:
            launchers.end()
        assert launcher.returncode == (1 if wrong else 0)
        written = launchers.outputs[0].read_text
        assert written().count("--lr must be above 0, got -1") == bool(wrong)
    assert records("run", "train")[-1]["step"] == 2


@pytest.mark.full
def test_a_run_folder_that_another_process_still_uses_is_tried_again():
    """It may be a rank of a machine without network, which exits after --timeout."""
    Path("runs/run").mkdir(parents=True)
    held = lock(Path("runs/run"), 0)
    launchers = Launchers([*FLAGS, *NAMED, "--max_steps", "2"], served=False)
    try:
        launchers.start()
        until(lambda: "error: runs/run is in use by" in launchers.outputs[0].read_text())
        held.close()
        until(lambda: launchers.alive[1].poll() is not None)
        assert launchers.alive[1].returncode == 0, launchers.outputs[0].read_text()
    finally:
        launchers.end()


@pytest.mark.full
def test_a_machine_joins_another_is_lost_and_the_bits_are_those_of_one_process():
    check_events(150, ["launcher added", "machine lost"], seed=0, served=False)
    first, *_, last = processes = [record["processes"] for record in records("run", "start")]
    assert (first, last) == (1, 1) and 2 in processes


def events_of(seed: int, kinds: tuple[str, ...], last: str = "store lost") -> list[str]:
    """Eight events.

    The first adds a launcher. After the last one, the run has to be started again.
    """
    chance = random.Random(f"events {seed}")
    return ["launcher added", *(chance.choice(kinds) for _ in range(6)), last]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_the_bits_are_those_of_one_process_whatever_happens_to_its_machines(seed):
    served = seed < 6  # else launchers meet in a file
    check_events(500, events_of(seed, EVENTS, ENDS[not served]), seed, served)


@pytest.mark.machines
@needs_machines
@pytest.mark.parametrize("seed", (8, 9))
def test_the_bits_are_those_of_one_process_whatever_happens_between_machines(tmp_path, seed):
    with network(tmp_path, count=4) as machines:
        check_events(500, events_of(seed, BETWEEN_MACHINES), seed, machines=machines)
