"""Train in forked ranks or by a command, and read what the run wrote."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import train
from extras.page.html import template
from helpers.ranks import Outcome, returned, run_ranks
from helpers.waiting import PATIENCE, records_so_far, until
from utils.models.weight_average import WeightAverage
from utils.runs.manifest import NEEDED, OPTIMIZER, checkpoint_of, write_manifest
from utils.runs.save_state import extend_save_state
from utils.runs.writing import finish_partial, new_partial, partial_of, publish

template("page.html")  # compiled once, before ranks are forked
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def words(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


def full(*values: Any):
    """A case of a parametrised test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


def codes(outcomes: Iterable[Outcome]) -> list[int]:
    """The exit codes of ranks."""
    return [outcome.code for outcome in outcomes]


# 4 updates an epoch, without the page, which takes longer than a few updates
MLP = words("--model mlp --global_batch_size 120 --max_train_samples 480 --threads 1 --lr 0.01")
MLP += words("--log_every 5 --eval_every 40 --save_every 30 --report false")


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Caches and runs are in that folder: each test is in one of its own, and so are fixtures that
    tests share.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("HF_HOME", str(folder / "huggingface"))
        patch.chdir(folder)
        yield


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Caches and runs are in that folder, and a copy of it as it is at the end is kept for
    `restore`.
    """
    with working_in(folder):
        yield
    folder.rename(folder.with_name("kept"))


def restore(folder: Path) -> Path:
    """Put the folder back as `kept_in` left it, under the name that its runs know; whatever was
    there is deleted.
    """
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(folder.with_name("kept"), folder))


def train_run(processes: int, name: str, *flags: str, seconds: float = PATIENCE) -> list[dict]:
    """Train on that many ranks in runs/NAME; returns the records of its log."""
    returned(processes, train.main, ["--run_name", name, *flags], seconds=seconds)
    return records(name)


def refused(function: Callable, *flags: str, processes: int = 1) -> str:
    """The one line, from one rank, with which `function(flags)` ends all ranks with code 2."""
    outcomes = run_ranks(processes, function, list(flags))
    assert all(outcome.code == 2 for outcome in outcomes), [outcome.err for outcome in outcomes]
    lines = [line for outcome in outcomes for line in outcome.err.splitlines()]
    assert len(lines) == 1, lines
    return lines[0]


def slow_train(flags: list[str], pause: float = 0.01, hold_at: int | None = None) -> None:
    """Train in runs/run with a pause in each update.

    Before update `hold_at`, counted from 0, the ranks wait, so that the run does not end before the
    test has acted on it.
    """

    def slow(run):
        if run.state.step == hold_at:
            hold(run)
        time.sleep(pause)

    train_watched(flags, slow)


def train_watched(flags: Iterable[str], before=lambda run: None, after=lambda run: None) -> None:
    """Train in runs/run, and call these with the run before and after each update."""
    update = train.train_update

    def watched(run, batches):
        before(run)
        update(run, batches)
        after(run)

    train.train_update = watched
    train.main(["--run_name", "run", *flags])


def kill_myself(number: int = signal.SIGKILL) -> None:
    """Send this rank a signal."""
    os.kill(os.getpid(), number)


def await_save(run) -> None:
    """Wait until the main process's thread has completed the last save, or failed.

    Not collective.
    """
    if run.checkpoints._saving is not None:
        run.checkpoints._saving.exception()


def hold(run) -> None:
    """Make a file `held-RANK` and wait for the file `go`."""
    Path(f"held-{run.ranks.topology.rank}").touch()
    until(Path("go").exists)


def records(name: str, kind: str | None = None) -> list[dict]:
    """The records of a run that has ended by itself, so that its log ends with a whole line."""
    log = Path("runs") / name / "log.jsonl"
    assert log.read_bytes().endswith(b"\n"), f"{log} ends in half a line"
    return [record for record in records_so_far(log) if kind in (None, record["kind"])]


def steps(name: str, kind: str) -> list[int]:
    """The updates of a run's records of this kind."""
    return [record["step"] for record in records(name, kind)]


def weights(name: str, which: str = "latest", file: str = "model.safetensors") -> dict:
    """The tensors of a run's checkpoint; those of the optimizer's state are named PARAMETER/KEY."""
    folder = Path("runs") / name / "checkpoints"
    checkpoint = folder / (folder / which).read_text().strip()
    return optimizer_tensors(checkpoint) if file == OPTIMIZER else load_file(checkpoint / file)


def optimizer_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors in the optimizer's state of a checkpoint, by PARAMETER/KEY."""
    saved = torch.load(checkpoint / OPTIMIZER, weights_only=True)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    states = [(name, saved["state"].get(key, {})) for name, key in zip(names, keys, strict=True)]
    values = {f"{name}/{key}": value for name, state in states for key, value in state.items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def make_saver(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
    accelerator: Accelerator | None = None,
) -> Callable[[Path, int], Path]:
    """A function that writes a checkpoint through Accelerate, as CheckpointManager does; in a rank
    of its own.
    """
    accelerator = accelerator or Accelerator(cpu=True)
    accelerator.prepare(module, optimizer)
    extend_save_state(accelerator, module, optimizer, average)

    def save(folder: Path, step: int) -> Path:
        new_partial(folder, step, 0)
        accelerator.save_state(partial_of(folder, step))
        finish_partial(partial_of(folder, step), dict.fromkeys(NEEDED[1:], b"{}"))
        publish(folder, step)
        return checkpoint_of(folder, step)

    return save


def rewrite_manifest(checkpoint: Path) -> None:
    """Write a manifest that matches the changed files, as somebody who knows the format would."""
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)


def same_tensors(one: dict, other: dict) -> bool:
    """Whether both have the same names and, bit for bit, the same tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def clean_environment() -> dict[str, str]:
    """The environment without variables of launchers."""
    launchers = ("OMP_", "ACCELERATE_", "RANK", "WORLD_")
    return {k: v for k, v in os.environ.items() if not k.startswith(launchers)}


def start(*command: str, seconds: float = 2 * PATIENCE, **env: str) -> tuple[int, str, str]:
    """Run a command of this environment's bin folder; returns its exit code, stdout and stderr."""
    result = subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=clean_environment() | env,
        stdin=subprocess.DEVNULL,
    )
    return result.returncode, result.stdout, result.stderr


def launch(config: str, script: str | Path, *flags: str, **env: str) -> tuple[int, str, str]:
    """Run a script by `accelerate launch` with one of our configs; returns its exit code, stdout
    and stderr.
    """
    file = ROOT / f"accelerate_configs/{config}.yaml"
    return start("accelerate", "launch", "--config_file", file, ROOT / script, *flags, **env)
