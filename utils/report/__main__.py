"""Write the page of one or several runs: python -m utils.report RUN [RUN ...] [--out FILE]
[--no_images]
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import argparse
from collections.abc import Sequence

from utils.config.bounds import require
from utils.files import check_output_file, expand
from utils.launch.exits import exit_with_error
from utils.report.page import PAGE, write_page


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, and print where it is."""
    guard_output()
    parser = argparse.ArgumentParser(
        "python -m utils.report", description="Write the page of one or several runs."
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folder; several are compared on one page"
    )
    parser.add_argument(
        "--out", help=f"file to write (default: {PAGE} in the run folder; needed for several runs)"
    )
    parser.add_argument("--no_images", action="store_true", help="leave out all pictures")
    flags = parser.parse_args(argv)
    folders = [expand(run) for run in flags.runs]
    out = expand(flags.out) if flags.out else folders[0] / PAGE
    try:
        require(flags.out or len(folders) == 1, "--out is missing", "name the file of the page")
        if flags.out:
            check_output_file("--out", out)
        write_page(folders, out, images=not flags.no_images)
    except Exception as error:
        exit_with_error(error, parser.prog)
    print(out)


if __name__ == "__main__":
    main()
