"""Helpers of the benchmarks: run commands in turn, compute medians and ranges, describe the
machine, write results.
"""

import argparse
import json
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from textwrap import fill
from threading import Timer
from typing import Any

import psutil
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks/records"
MNIST_IMAGES = 60_000  # in the training split


def machine() -> dict:
    """The machine and the library versions of a measurement."""
    import torch
    import torchvision

    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": found[1] if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the installed libraries that a benchmark may use."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "accelerate", "datasets", "timm", "lightning"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str:
    """The Git commit of this code; it ends with -dirty if files have changed since."""
    sys.path.insert(0, str(ROOT))
    from utils.version import code_commit

    return code_commit()


def machine_line() -> str:
    """The machine in one line, to print under a table."""
    m = machine()
    gpu = f", {m['gpus']} x {m['gpu']}" if m["gpus"] else ""
    cpu = f"{m['cores']} x {m['cpu']} ({m['cpu_capability']})"
    return f"{cpu}{gpu}; torch {m['torch']}, torchvision {m['torchvision']}"


def in_turns(sides: Mapping[str, Callable[[], float | dict]], rounds: int) -> dict[str, list]:
    """The results of each side in each round. Every round runs all sides, in a new random order.

    The speed of a machine drifts by more than the differences of interest, so compare only sides of
    the same round.
    """
    results, shuffle = {name: [] for name in sides}, random.Random(0)
    with tqdm(total=rounds * len(sides)) as bar:
        for _ in range(rounds):
            for name in shuffle.sample(sorted(sides), len(sides)):
                bar.set_description(str(name))
                results[name].append(sides[name]())
                bar.update()
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours divided by theirs, in each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def over(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The same as text."""
    return spread(ratios(ours, theirs), ".2f")


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median; if there are several values, also the lowest and the highest in brackets."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def markdown(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def paragraph(text: str) -> str:
    """A paragraph of a Markdown page, in lines of at most 120 columns."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def parse_flags(
    doc: str, needs: Sequence[str] = (), rounds: int | None = 5, **flags: tuple[Any, str]
) -> argparse.Namespace:
    """The flags of the command line; `doc` is the script's docstring.

    `flags` has the default and the help of each flag. A class in place of the default is the type
    of a flag that has none; `needs` names those that are required. A flag whose default is False
    takes no value. All benchmarks have --rounds and --json, unless `rounds` is None.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        flags["rounds"] = rounds, "runs of each side"
        flags["json"] = Path, "also write all numbers to this file"
    for name, (default, text) in flags.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        elif isinstance(default, type):
            parser.add_argument(f"--{name}", type=default, required=name in needs, help=text)
        else:
            text += " (default: %(default)s)"
            parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser.parse_args()


def report(
    args: argparse.Namespace, header: Sequence[str], rows: Sequence[Sequence], results: Mapping
) -> None:
    """Print the table and the machine, and write a record of all rounds to --json if it is set.

    A key of the results that is a tuple is written as its parts.
    """
    print(f"{markdown(header, rows)}\n\n{machine_line()}")
    if args.json:
        names = [name if isinstance(name, str) else ", ".join(map(str, name)) for name in results]
        script = Path(sys.argv[0]).name
        record = {
            "command": shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
            "date": date.today().isoformat(),
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "settings": {k: str(v) for k, v in vars(args).items()},
            "results": dict(zip(names, results.values(), strict=True)),
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def numbers(text: str) -> list[int]:
    """The numbers of a flag such as --processes 1,2, ascending."""
    return sorted(map(int, text.split(",")))


def launch(processes: int, device: str | None = None) -> list[str]:
    """The command that runs a script: Python for one process, else accelerate launch with the
    project's config.

    Several processes run on `device`, cpu or gpu; if it is None, on CPUs only if there are too few
    GPUs for them.
    """
    from torch import cuda

    if processes == 1:
        return [sys.executable]
    if device is None:
        device = "gpu" if cuda.device_count() >= processes else "cpu"
    config = ROOT / f"accelerate_configs/2{device}.yaml"
    where = flags(config_file=config, num_processes=processes)
    return [sys.executable, "-m", "accelerate.commands.launch", *where]


def run(
    command: Sequence,
    until: Callable[[str], bool] | None = None,
    seconds: float = 1800.0,
    env: Mapping | None = None,
) -> tuple[list[tuple[float, str]], float]:
    """Run a command until it exits, or kill it after the first line of its output that `until`
    accepts.

    Returns its lines, each with the seconds since the start of the command, and the total seconds.
    Raises TimeoutError after `seconds`, and SystemExit with its last lines if it fails. Its child
    processes are killed too, except those whose parent had already exited.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    command, lines, begun = [str(word) for word in command], [], time.perf_counter()
    environment, pipe = {**os.environ, **(env or {})}, subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        clock = Timer(seconds, kill, [process.pid])
        try:
            clock.start()
            for line in process.stdout:
                lines.append((time.perf_counter() - begun, line))
                if until and until(line):
                    return lines, lines[-1][0]
            code, taken = process.wait(), time.perf_counter() - begun
        finally:
            clock.cancel()
            kill(process.pid)
            signal.signal(signal.SIGTERM, before)
    if taken >= seconds:
        raise TimeoutError(f"{' '.join(command)} took more than {seconds:.0f} s")
    if code:
        last = "".join(line for _, line in lines[-20:])
        raise SystemExit(f"{' '.join(command)} exited with code {code}:\n{last}")
    return lines, taken


def last_json(command: Sequence, **how: Any) -> dict:
    """Run a command, as `run` does; returns the last line of JSON that it printed, parsed."""
    return json.loads([line for _, line in run(command, **how)[0] if line.startswith("{")][-1])


def kill(pid: int) -> None:
    """Kill a process and all its descendants, since the ranks of a launcher have separate process
    groups.
    """
    with suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def flags(**settings) -> list[str]:
    """Settings as command-line flags, without those that are None."""
    given = {f"--{name}": str(value) for name, value in settings.items() if value is not None}
    return [word for pair in given.items() for word in pair]


def train(
    processes: int,
    *settings: str,
    then: Callable[[Path], None] | None = None,
    device: str | None = None,
    **how: Any,
) -> list[dict]:
    """Train with train.py in a temporary folder, as `run` does; returns the records of its log.

    `then` is called with the run folder before it is deleted.
    """
    with temporary() as folder:
        place = flags(output_dir=folder, run_name="run")
        run([*launch(processes, device), ROOT / "train.py", *settings, *place], **how)
        if then:
            then(folder / "run")
        return read_log(folder / "run")


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder that is deleted at the end of the block."""
    with TemporaryDirectory(prefix="lockstep-") as folder:
        yield Path(folder)


def read_log(run_folder: Path) -> list[dict]:
    """The records of a run's log."""
    return [json.loads(line) for line in (run_folder / "log.jsonl").read_text().splitlines()]


def latest_checkpoint(run_folder: Path) -> Path:
    """The last checkpoint of a run."""
    checkpoints = run_folder / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


def note_times(owner: object, name: str, note: Callable[[str, float], None]) -> None:
    """Make a function of a module or class note when it is called and when it has returned."""
    function = getattr(owner, name)

    def noting(*arguments, **keywords):
        note(f"{name} called", time.time())
        try:
            return function(*arguments, **keywords)
        finally:
            note(f"{name} ended", time.time())

    setattr(owner, name, noting)


def rates(log: Sequence[dict]) -> list[float]:
    """Images per second of each train record but the first, in which the processes warm up."""
    return [record["images_per_second"] for record in log if record["kind"] == "train"][1:]
