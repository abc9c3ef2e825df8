"""Write the page of one or several runs: python -m extras.compare RUN [RUN ...] [--out FILE]
[--no_images] [--plugin FILE]
"""

from collections.abc import Sequence

from extras.compare.command import check_runs, parse_runs
from extras.compare.pairs import write_groups
from extras.page.page import PAGE
from utils.config import require
from utils.files import expand
from utils.output import guard_output
from utils.replacing import HTML, check_output

_ABOUT = "Write the page of a run, or compare several runs on one page."
_OUT = f"page to write (default: {PAGE} in the run folder; needed for several runs)"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, and print where it is."""
    guard_output()
    with parse_runs("compare", argv, _ABOUT, _OUT) as flags:
        if flags.out is None:
            require(len(flags.folders) == 1, "--out is missing", "name the file of the page")
        else:
            check_output(flags, "out", HTML)
        check_runs(flags)
        out = expand(flags.out) if flags.out else flags.folders[0] / PAGE
        write_groups(flags.groups, out, images=not flags.no_images)
    print(out)


if __name__ == "__main__":
    main()
