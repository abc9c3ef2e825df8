"""The command line that `python -m extras.compare` and `python -m extras.folds` share."""

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from utils.config import load_plugin
from utils.errors import USER_ERRORS, UserError
from utils.files import expand
from utils.launch import exit_with_error
from utils.runs import check_log


@contextmanager
def parse_runs(
    name: str, argv: Sequence[str] | None, description: str, out: str
) -> Iterator[argparse.Namespace]:
    """The flags of `python -m extras.NAME`; `groups` has the folders of each RUN, `folders` all.

    `description` and `out` are the help of the command and of --out. An error in this context is
    reported on one line.
    """
    parser = argparse.ArgumentParser(f"python -m extras.{name}", description=description)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder, or NAME of NAME-seed0, NAME-seed1, ...",
    )
    parser.add_argument("--out", help=out)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="let --out replace files that Lockstep has not written",
    )
    parser.add_argument("--no_images", action="store_true", help="leave out all pictures")
    parser.add_argument("--plugin", metavar="FILE", help="plug-in that the runs were made with")
    flags = parser.parse_args(argv)
    flags.groups = [find_runs(expand(run)) for run in flags.runs]
    flags.folders = [folder for group in flags.groups for folder in group]
    try:
        yield flags
    except Exception as error:
        if not isinstance(error, USER_ERRORS):
            problem = f"a file of the run has unknown contents: {error!r}"
            error = UserError(problem, "use the version of Lockstep that wrote it")
        exit_with_error(error, parser.prog)


def find_runs(given: Path) -> list[Path]:
    """The folder of a run; if there is none, those of its seeds: NAME-seed0, NAME-seed3, ..."""
    name = re.escape(given.name) + r"-seed\d+"  # not those of NAME-seed0-other
    seeds = sorted(each for each in given.parent.glob("*") if re.fullmatch(name, each.name))
    return [given] if given.exists() or not seeds else seeds


def check_runs(flags: argparse.Namespace) -> None:
    """Load the plug-in, and raise UserError or OSError for folders that are not run folders."""
    if flags.plugin:
        load_plugin(flags.plugin)
    for folder in flags.folders:
        check_log(folder)
