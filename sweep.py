"""Train a run for each combination of settings and each seed, and compare the combinations.

    python sweep.py --name digits --seeds 5
    python sweep.py --name lr --seeds 3 --grid lr=0.05,0.1 mixup=0,0.2 -- --data photos --epochs 10
    python sweep.py --name lr --dry_run --grid lr=0.05,0.1 -- --data photos --epochs 10

Flags after -- are those of train.py. Each run is the one that train.py would train alone. If it is
started again, a sweep trains the missing runs and resumes those that were stopped. Several
processes can work on the same sweep. `python sweep.py --help` lists the settings.
"""

from utils.entry import guard_output  # the first import, see there

import sys
from collections.abc import Sequence

from extras.sweep.answer import print_answer
from extras.sweep.trials import make_trials, write_trials
from extras.sweep.worker import Worker, estimate
from utils.config import parse_args, require
from utils.errors import USER_ERRORS
from utils.launch import exit_with_error, is_launched, read_topology
from utils.output import exit_with
from utils.settings.scripts import SweepConfig
from utils.settings.train import NAMES


def main(argv: Sequence[str] | None = None) -> None:
    """Train and compare. Exits with code 1 if a run has failed, and with 75 if stopped."""
    guard_output()
    words = list(sys.argv[1:] if argv is None else argv)
    own, flags = words, []
    if "--" in words:
        place = words.index("--")
        own, flags = words[:place], words[place + 1 :]
    try:
        fix = "start it with python, and give the launcher to --launch"
        is_alone = not is_launched() and read_topology().world_size == 1
        require(is_alone, "a launcher or several tasks cannot start sweep.py", fix)
        for word in own:
            name = word.removeprefix("--").partition("=")[0]
            is_theirs = word.startswith("--") and name in NAMES and not hasattr(SweepConfig, name)
            instead = "use --seeds" if name == "seed" else "write it after --"
            require(not is_theirs, f"{word} is a flag of train.py", instead)
        config = parse_args(SweepConfig, "sweep.py", own)
        trials = make_trials(config, flags)
        if config.dry_run:
            estimate(trials)
            return
        write_trials(trials)
        with Worker(trials) as worker:
            code = worker.work()
        if not worker.left:
            print_answer(trials, worker.failed)
    except USER_ERRORS as error:
        exit_with_error(error, "sweep.py")
    exit_with(code)


if __name__ == "__main__":
    main()
