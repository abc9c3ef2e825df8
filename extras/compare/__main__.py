"""Write the page of one or several runs: python -m extras.compare RUN [RUN ...] [--out FILE]
[--no_images] [--plugin FILE]
"""

import argparse
from collections.abc import Sequence

from extras.compare.pairs import find_runs, write_groups
from extras.page.page import PAGE
from utils.config import load_plugin, require
from utils.errors import USER_ERRORS, UserError
from utils.files import expand
from utils.launch import exit_with_error
from utils.output import guard_output
from utils.replacing import HTML, check_output
from utils.runs import check_log


def main(argv: Sequence[str] | None = None, write=write_groups, name="compare", kind=HTML) -> None:
    """Write the page, or call another `write(groups, out, images)` that writes a file of another
    kind and maybe a page beside it; print where the result is.
    """
    guard_output()
    parser = argparse.ArgumentParser(
        f"python -m extras.{name}", description="Write a file about one or several runs."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder, or NAME of NAME-seed0, NAME-seed1, ...; several are compared on one page",
    )
    parser.add_argument(
        "--out", help=f"file to write (default: {PAGE} in the run folder; needed for several runs)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="let --out replace files that Lockstep has not written",
    )
    parser.add_argument("--no_images", action="store_true", help="leave out all pictures")
    parser.add_argument("--plugin", metavar="FILE", help="plug-in that the runs were made with")
    flags = parser.parse_args(argv)
    groups = [find_runs(expand(run)) for run in flags.runs]
    folders = sum(groups, [])
    out = expand(flags.out) if flags.out else folders[0] / PAGE
    try:
        require(flags.out or len(folders) == 1, "--out is missing", "name the file of the page")
        if flags.out:
            check_output(flags, "out", kind)
            if kind is not HTML and not flags.no_images:  # the page beside it
                check_output(flags, "out", HTML, out=f"{out.with_suffix('.html')}")
        if flags.plugin:
            load_plugin(flags.plugin)
        for folder in folders:
            check_log(folder)
        write(groups, out, images=not flags.no_images)
    except Exception as error:
        if not isinstance(error, USER_ERRORS):
            problem = f"a file of the run has unknown contents: {error!r}"
            error = UserError(problem, "use the version of Lockstep that wrote it")
        exit_with_error(error, parser.prog)
    print(out)


if __name__ == "__main__":
    main()
