"""kill -9 of any process at any moment, saving included: the bits are those of a whole run.

The full table:  python -m pytest -m slow -s tests/promises/test_kills.py
"""

import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import safetensors
import torch
from helpers import training_runs
from helpers.ranks import Launch, returned, start_ranks
from helpers.training_runs import (
    MLP,
    codes,
    full,
    kill_myself,
    make_saver,
    records,
    same_tensors,
    slow_train,
    steps,
    train_run,
    weights,
    words,
)
from helpers.waiting import has_logged, records_so_far, until

import train
from utils.models.weight_average import WeightAverage
from utils.runs.manifest import checkpoints_of, damage_of, newest_good, step_of
from utils.runs.writing import clean_up, delete_after, prune, update_pointers

# of the disk, as audited
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
SAVE_EVERY = 3
UPDATES = 40
CHANGES_OF_A_SAVE = 28  # a save makes at least this many
FLAGS = words("--model mnist_cnn --image_size 12 --crop_padding 2 --flip --global_batch_size 120")
FLAGS += words("--max_train_samples 500 --threads 1 --lr 0.02 --log_every 1 --eval_every 10")
FLAGS += words(f"--max_steps {UPDATES} --save_every {SAVE_EVERY} --ema_decay 0.9 --run_name run")
AUTO = [*FLAGS, "--resume", "auto"]


def kill(launch: Launch, whom: str, chance: random.Random) -> None:
    if whom == "launcher":
        os.kill(launch.launcher, signal.SIGKILL)
    elif whom == "one rank":
        os.kill(chance.choice(launch.pids), signal.SIGKILL)
    else:
        launch.kill()


def train_until_killed(save: tuple[int, int] | None) -> None:
    """Train, and wait before the last update; with `save`, a pair (step, change), also during a
    save.

    It waits in the first save after update `step`, before that change of the disk. A save takes
    some 20 ms, which a test on a busy machine would miss. If its thread waits, the training goes on
    until the next save.
    """
    # the save to wait in, and the changes until the wait
    place = [save, None]

    def count(event, arguments):
        found = re.search(r"/\.step-(\d+)", str(arguments[0]) if arguments else "")
        if place[0] is None or not (event in CHANGES or event == "open") or not found:
            return
        step, change = place[0]
        if place[1] is None and int(found[1]) >= step:
            place[1] = change
        if place[1] == 0:
            place[0] = None
            Path("saving").touch()
            until(Path("go").exists)
        elif place[1] is not None:
            place[1] -= 1

    if save and os.environ.get("RANK", "0") == "0":
        sys.addaudithook(count)
    slow_train(FLAGS, 0, UPDATES - 1)


def kill_and_resume(
    processes: int, whom: str, saving: bool, chance: random.Random, whole: dict
) -> tuple[int, int]:
    """Start a run, kill it at a random moment (of a save), resume it, and compare it with the whole
    one; returns from which update it went on, and how many it repeated.
    """
    shutil.rmtree("runs/run", ignore_errors=True)
    for sign in ("saving", "go"):
        Path(sign).unlink(missing_ok=True)
    step = chance.randrange(1, UPDATES - 4)
    save = (step, chance.randrange(CHANGES_OF_A_SAVE)) if saving else None
    launch = start_ranks(processes, train_until_killed, save, launcher=True)
    if saving:
        until(Path("saving").exists)
    else:
        until(has_logged(step))
        time.sleep(chance.uniform(0, 0.05))
    kill(launch, whom, chance)
    Path("go").touch()  # for those that live on
    # orphans save what they have and ask to be gone on with
    for outcome in launch.finish_soon():
        assert outcome.code in (0, 75) if whom == "launcher" else outcome.code != 0
    # a kill may cut off the last line of the log
    log = records_so_far(Path("runs/run/log.jsonl"))
    reached = max(record["step"] for record in log if record["kind"] == "train")
    complete = newest_good(Path("runs/run"))
    after = start_ranks(processes, train.main, AUTO).finish()
    assert codes(after) == [0] * processes, after[0].err
    start = steps("run", "start")[-1]
    assert start == (step_of(complete) if complete else 0)
    # a checkpoint is completed at the latest when the next save begins, so two intervals can be
    # lost
    assert 0 <= reached - start <= 2 * SAVE_EVERY
    assert steps("run", "train") == list(range(1, UPDATES + 1)), "a hole or a repeated update"
    found = tensors("run")
    assert all(same_tensors(found[file], whole[file]) for file in whole)
    return start, reached - start


def uninterrupted(processes: int) -> dict:
    train_run(processes, "whole", *FLAGS, "--run_name", "whole")
    return tensors("whole")


def tensors(name: str) -> dict:
    """The weights of a run, and their average."""
    return {file: weights(name, file=file) for file in ("model.safetensors", "ema.safetensors")}


@pytest.mark.full
def test_killed_runs_end_with_the_weights_of_a_whole_one():
    whole, chance = uninterrupted(2), random.Random(1)
    for whom, saving in (("one rank", False), ("all ranks", True)):
        kill_and_resume(2, whom, saving, chance, whole)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_twenty_kills_at_random_moments(processes):
    whole, chance = uninterrupted(processes), random.Random(processes)
    columns = "processes | killed | while saving | resumed from update | repeated updates | weights"
    print(f"\n| {columns} |\n{'| --- ' * 6}|")
    for number in range(20):
        whom = ("one rank", "all ranks", "launcher")[number % 3]
        saving = number % 2 == 1
        start, redone = kill_and_resume(processes, whom, saving, chance, whole)
        saved = "yes" if saving else "no"
        print(f"| {processes} | {whom} | {saved} | {start} | {redone} | bit-identical |")


@pytest.mark.full
def test_two_kills_and_moves_to_other_processes_keep_order_and_losses():
    flags = words("--log_every 1 --save_every 3 --lr_schedule constant --resume auto")
    flags = [*MLP, *flags, "--max_steps", "60"]
    whole = train_run(1, "whole", *flags)
    for attempt, (processes, stop) in enumerate([(2, 22), (1, 43)]):
        launch = start_ranks(processes, _train_and_record, attempt, flags, stop)
        until(lambda count=processes, run=attempt: len(list(Path().glob(f"held-{run}-*"))) == count)
        launch.kill()
        launch.finish()
    last = start_ranks(3, _train_and_record, 2, flags, None)
    assert codes(last.finish()) == [0] * 3
    losses = [record["loss"] for record in records("run", "train")]
    expected = [record["loss"] for record in whole if record["kind"] == "train"]
    assert len(losses) == 60 and losses == pytest.approx(expected, rel=1e-5)
    seen: dict[int, dict[int, list[int]]] = defaultdict(dict)  # update -> attempt -> samples
    for path in sorted(Path("seen").iterdir()):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            seen[record["step"]].setdefault(int(path.name[0]), []).extend(record["samples"])
    assert any(len(attempts) > 1 for attempts in seen.values()), "no update was done again"
    for epoch in range(15):  # of 4 updates
        last = [seen[step][max(seen[step])] for step in range(4 * epoch, 4 * epoch + 4)]
        assert sorted(sample for samples in last for sample in samples) == list(range(480))


def _train_and_record(attempt, flags, stop):
    """Train and write down which samples each update has on this rank; after update `stop` wait to
    be killed.
    """
    update = train.train_update
    Path("seen").mkdir(exist_ok=True)

    def recorded(run, batches):
        samples, step = [], run.state.step

        def watched():
            batch = next(batches)
            samples.extend(batch.indices.tolist())
            yield batch

        update(run, (batch for _ in iter(int, 1) for batch in watched()))
        with Path(f"seen/{attempt}-{run.ranks.topology.rank}").open("a") as file:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")
        if step + 1 == stop:
            Path(f"held-{attempt}-{run.ranks.topology.rank}").touch()
            time.sleep(600)

    train.train_update = recorded
    train.main(["--run_name", "run", *flags])


@pytest.mark.parametrize("first", [0, full(1), full(2)])
def test_a_kill_between_any_two_file_operations_leaves_a_good_checkpoint(first):
    """Saving, pruning and going back are ended before each third change of the disk."""
    assert returned(1, _end_before_operations, first)[0] > 60  # so many operations


def _end_before_operations(first: int) -> int:
    """Returns the number of operations; fails where an end leaves no good checkpoint, or a mess
    that stays.
    """
    folder, layer = Path("checkpoints"), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1)
    write = make_saver(layer, optimizer, WeightAverage(layer, 0.9))
    before_end = [-1]

    def step_on():
        if before_end[0] == 0:
            os._exit(1)
        before_end[0] -= before_end[0] > 0

    def count(event, arguments):
        if event in CHANGES or (event == "open" and "checkpoints" in str(arguments[0])):
            step_on()

    def counted(real):  # it writes a file outside of Python
        return lambda *arguments, **more: (step_on(), real(*arguments, **more), step_on())

    def as_with_fsdp(partial, *more):
        (partial / "model.safetensors").rename(partial / "parameters.safetensors")
        torch.save(layer.state_dict(), partial / "pytorch_model_fsdp.bin")
        complete(partial, *more)

    safetensors.torch.serialize_file = counted(safetensors.torch.serialize_file)
    torch.save = counted(torch.save)
    complete, training_runs.finish_partial = training_runs.finish_partial, as_with_fsdp

    def save(step, is_best=False):
        write(folder, step)
        update_pointers(folder, step, best_step=step if is_best else None, keep=9)

    def ended(existing, action, good):
        number, before = first, Path(f"before-{existing[0]}-{existing[-1]}-{len(good)}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for step in existing:
            save(step, is_best=step == existing[0])
        folder.rename(before)
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(before, folder)
            child = os.fork()
            if not child:
                before_end[0] = number
                action()
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            clean_up(folder)
            newest = checkpoints_of(folder)[-1]
            assert int(newest.name[5:]) in good and not damage_of(newest), (number, newest)
            assert not list(folder.glob(".*")), number
            for name in ("latest", "best"):
                assert (folder / (folder / name).read_text().strip()).is_dir(), number
            if code == 0:
                return number
            number += 3

    sys.addaudithook(count)
    gc.freeze()  # else a collection in a child copies all of this process's memory
    return (
        ended([1, 2], lambda: (save(3, is_best=True), prune(folder, 1, folder)), good=(2, 3))
        # again, after an evaluation that was owed
        + ended([1, 2], lambda: save(2, is_best=True), good=(2,))
        + ended([2, 3, 4, 5], lambda: delete_after(folder, 3, best_step=2), good=(3, 4, 5))
    )


@pytest.mark.full
def test_a_run_killed_while_it_writes_its_analysis_shows_it_after_a_resume():
    flags = [*MLP, *words("--max_steps 8 --save_every 3 --run_name run --report true")]
    killed = start_ranks(2, _train_until_the_analysis, flags, launcher=True)
    assert -signal.SIGKILL in codes(killed.finish())
    assert list(Path("runs/run").glob(".report.json.*.partial"))
    train_run(2, "run", *flags, "--resume", "auto")
    train_run(2, "whole", *flags, "--run_name", "whole")
    paths = (Path(f"runs/{name}/report.json") for name in ("run", "whole"))
    found, expected = (json.loads(path.read_text()) for path in paths)
    for analysis in (found, expected):
        analysis["record"].pop("seconds")
    assert found == expected and found["record"]["step"] == 8
    assert "Confusion" in Path("runs/run/report.html").read_text()
    assert list(Path("runs/run").glob(".*.partial")) == []
    assert steps("run", "eval") == [8]


def _train_until_the_analysis(flags: list[str]) -> None:
    def kill(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("report.json"):
            kill_myself()

    sys.addaudithook(kill)
    train.main(flags)
