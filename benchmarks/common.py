"""What the benchmarks share: turns, spreads, the machine's name, and one way to write a result down."""

import argparse
import json
import os
import platform
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torchvision
from tqdm import tqdm


def machine() -> dict:
    """What the numbers were measured on."""
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


def machine_line() -> str:
    """The machine in one line, to stand under a table."""
    m = machine()
    gpu = f", {m['gpus']} x {m['gpu']}" if m["gpus"] else ""
    return f"{m['cores']} x {m['cpu']} ({m['cpu_capability']}){gpu}; torch {m['torch']}, torchvision {m['torchvision']}"


def in_turns(sides: Mapping[str, Callable[[], float | dict]], rounds: int) -> dict[str, list]:
    """What each side returned in each round; every round runs all sides, in a random order of its own.

    Machines drift by more than the differences looked for, so only sides of the same round may be compared.
    """
    results, shuffle = {name: [] for name in sides}, random.Random(0)
    with tqdm(total=rounds * len(sides)) as bar:
        for _ in range(rounds):
            for name in shuffle.sample(sorted(sides), len(sides)):
                bar.set_description(name)
                results[name].append(sides[name]())
                bar.update()
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, and in brackets the lowest and the highest."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def markdown(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def make_parser(doc: str, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark, `doc` its module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="runs of each side (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single number to FILE")
    return parser


def report(args: argparse.Namespace, header: Sequence[str], rows: Sequence[Sequence], results: dict) -> None:
    """Print the table and the machine, and write all of it to --json if that was given."""
    print(f"{markdown(header, rows)}\n\n{machine_line()}")
    if args.json:
        record = {"machine": machine(), "settings": {k: str(v) for k, v in vars(args).items()}, "results": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
