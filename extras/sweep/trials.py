"""The runs of a sweep: their settings, names and commands, and trials.csv, which lists them."""

import csv
import hashlib
import io
import shlex
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from extras.sweep.claims import claimed, open_claim
from utils.config import fix_for_unknown, parse_given, require
from utils.files import expand, read_text, write_file
from utils.settings.scripts import SweepConfig
from utils.settings.train import NAMES, OF_THIS_MACHINE, TrainConfig
from utils.training import REGISTRIES

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
_REFUSED = ("run_name", "resume", "stop_after", "dry_run")  # flags of train.py
_LONGEST = 150  # characters of the name of a combination


@dataclass(frozen=True)
class Trial:
    """A run of a sweep."""

    combination: str  # the name of its combination, such as lr=0.1,mixup=0.2
    seed: int
    values: dict[str, str]  # the combination
    flags: list[str]  # of train.py
    settings: str  # what they mean, see `settings_of`
    launch: list[str]  # the command that starts train.py
    sweep: Path  # the folder of the sweep

    @property
    def name(self) -> str:
        return f"{self.combination}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.sweep / self.name

    @property
    def command(self) -> list[str]:
        """Trains or resumes this run."""
        place = ["--output_dir", str(self.sweep), "--run_name", self.name, "--resume", "auto"]
        return [*self.launch, str(TRAIN), *self.flags, *place]


def make_trials(config: SweepConfig, flags: Sequence[str]) -> list[Trial]:
    """The runs of a sweep, after a check of their settings; `flags` are those of train.py.

    All runs of a seed come before those of the next, so that a sweep that is stopped early has all
    combinations.
    """
    base, _ = parse_given(TrainConfig, "sweep.py", flags, REGISTRIES)
    typed = {word.partition("=")[0] for word in flags}
    refused = {name: getattr(base, name) != getattr(TrainConfig, name) for name in _REFUSED}
    both = config.seeds is not None and "--seed" in typed
    require(not both, "--seeds and --seed cannot be used together", "use only one")
    for name, is_given in refused.items():
        require(not is_given, f"a sweep does not take --{name} of train.py", "leave it out")
    combinations = combinations_of(config)
    check_names(combinations, typed)
    seeds = config.seeds or [base.seed]
    trials = []
    known: dict[str, str] = {}
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        for values in combinations:
            more = [f"--{name}={value}" for name, value in values.items()]
            own = [*flags, *more, f"--seed={seed}"]
            trial = Trial(
                combination=name_of(values) or config.name,
                seed=seed,
                values=values,
                flags=own,
                settings=settings_of(own),
                launch=shlex.split(config.launch or "") or [sys.executable],
                sweep=expand(base.output_dir) / config.name,
            )
            same = known.setdefault(trial.settings, trial.name)
            require(
                same == trial.name,
                f"{same} and {trial.name} have the same settings",
                "leave one out",
            )
            trials.append(trial)
    return trials


def combinations_of(config: SweepConfig) -> list[dict[str, str]]:
    """The values of the settings that differ, for each combination."""
    if config.trials:
        text = read_text(expand(config.trials), 2**20).removeprefix("\ufeff")  # of Excel
        rows = [*csv.DictReader(io.StringIO(text))]
        fix = "write the names in the first line, and a combination in each other line"
        is_table = rows and all(None not in row and None not in row.values() for row in rows)
        require(is_table, f"--trials {config.trials} is not a table of settings", fix)
        return [{name: value for name, value in row.items() if value} for row in rows]
    names = [part.partition("=")[0] for part in config.grid]
    values = [part.partition("=")[2].split(",") for part in config.grid]
    for part, own in zip(config.grid, values, strict=True):
        require(
            all(own), f"--grid {part}: a value is missing", "write NAME=VALUE,VALUE without spaces"
        )
    require(len({*names}) == len(names), "--grid names a setting twice", "write NAME=VALUE,VALUE")
    return [dict(zip(names, each, strict=True)) for each in product(*values)]


def check_names(combinations: Sequence[dict], typed: Set[str]) -> None:
    """Raise UserError for a setting that does not exist, or that a sweep cannot vary; `typed` are
    the flags of train.py.
    """
    for name in dict.fromkeys(name for values in combinations for name in values):
        require(name in NAMES, f"unknown setting {name}", fix_for_unknown(name, NAMES))
        require(name != "seed", "a sweep cannot vary seed", "use --seeds")
        can_vary = name not in (*OF_THIS_MACHINE, "task", "best_metric", "report")
        require(can_vary, f"a sweep cannot vary {name}", "leave it out")
        both = f"{name} is in the sweep and in the flags"
        require(f"--{name}" not in typed, both, "leave one out")


def settings_of(flags: Sequence[str]) -> str:
    """A hash of the settings that the flags of train.py give on any machine."""
    config, _ = parse_given(TrainConfig, "sweep.py", flags, REGISTRIES)
    values = asdict(config)
    return _hash(repr([values[name] for name in NAMES if name not in OF_THIS_MACHINE]))


def name_of(values: dict[str, str]) -> str:
    """The name of a combination; what cannot be in the name of a folder is hashed."""
    name = ",".join(f"{name}={_in_name(value)}" for name, value in values.items())
    return name if len(name) <= _LONGEST else _hash(name)


def _in_name(value: str) -> str:
    is_plain = len(value) <= 40 and value.isprintable() and not {*value} & {*"/, ="}
    return value if is_plain else _hash(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def write_trials(trials: Sequence[Trial]) -> None:
    """Add the trials to trials.csv in the folder of the sweep.

    Raises UserError if one of them is there with other settings.
    """
    folder = trials[0].sweep
    require(not (folder / "log.jsonl").exists(), f"{folder} is a run", "choose another --name")
    folder.mkdir(parents=True, exist_ok=True)
    with open_claim(folder / ".trials") as claim:
        while not claimed(claim):
            time.sleep(0.1)
        write_file(folder / "trials.csv", _as_csv(trials, folder / "trials.csv"))


def _as_csv(trials: Sequence[Trial], file: Path) -> str:
    rows = {}
    if file.exists():
        old = csv.DictReader(io.StringIO(read_text(file, 2**24)))
        is_own = "trial" in (old.fieldnames or ())
        require(is_own, f"{file} is damaged", "restore it, or choose another --name")
        rows = {row["trial"]: row for row in old}
    for trial in trials:
        row = {"trial": trial.name, "seed": str(trial.seed), **trial.values}
        row |= {"settings": trial.settings, "flags": shlex.join(trial.flags)}
        is_same = rows.get(trial.name, row).get("settings") == row["settings"]
        problem = f"{trial.name} is in {file} with other settings"
        require(is_same, problem, "use the flags in this file, or choose another --name")
        rows[trial.name] = row
    last = ("settings", "flags")
    columns = dict.fromkeys(name for row in rows.values() for name in row if name not in last)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *last], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue()
