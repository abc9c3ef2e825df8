"""Run `make train` and the quick tests with the oldest, the tested or the newest versions, in a new
environment, and write the result into the table of versions in CONTRIBUTING.md.

    python3 tests/versions.py oldest --python python3.11

oldest: the lower bounds in requirements.txt and requirements-dev.txt. tested: constraints.txt.
newest: the newest versions that both files allow. Except with `tested`, dependencies of these
packages have the newest version that fits.

The exit code is that of `make`. Needs Python, make and network. The environment takes 7 GB in a
temporary folder (`TMPDIR`), which is deleted at the end unless --venv names another place.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("torch", "torchvision", "accelerate", "datasets")
HEADER = ("Versions", "Python", *SHOWN, "Passed", "Failed", "Skipped", "Date")


def lower_bounds() -> dict[str, str]:
    """The oldest allowed version of each package, without the pinned linters."""
    texts = [(ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt")]
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(texts), re.M))


def constraints(kind: str, folder: Path) -> str:
    """The options of pip that choose the versions."""
    if kind == "oldest":
        file = folder / "oldest.txt"
        file.write_text("".join(f"{name}=={version}\n" for name, version in lower_bounds().items()))
        return f"-c {file}"
    return "-c constraints.txt" if kind == "tested" else ""


def make(target: str, *variables: str) -> int:
    """Run `make` without the settings of a `make` that started this script.

    Returns the exit code.
    """
    others = ("MAKE", "MFLAGS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return subprocess.run(["make", "-C", ROOT, target, *variables], env=environment).returncode


def row(kind: str, venv: Path, results: Path) -> list[str]:
    """The cells below HEADER, from the environment and the JUnit file of the tests."""
    code = "import platform, sys; from importlib.metadata import version"
    code += "; print(platform.python_version(), *map(version, sys.argv[1:]))"
    command = [venv / "bin/python", "-c", code, *SHOWN]
    installed = subprocess.check_output(command, text=True).split()
    suite = ElementTree.parse(results).getroot()[0]
    total, errors, failures, skipped = (
        int(suite.get(k, 0)) for k in ("tests", "errors", "failures", "skipped")
    )
    failed = errors + failures
    counts = map(str, (total - failed - skipped, failed, skipped))
    return [kind, *installed, *counts, date.today().isoformat()]


def write_row(page: Path, cells: list[str]) -> None:
    """Replace the row of the page's table that has the same first cell.

    A page without this table or row gets a table at its end.
    """
    text = page.read_text() if page.exists() else ""
    header, rule, new = map(line_of, (HEADER, ["---"] * len(HEADER), cells))
    old = re.search(rf"^\| {cells[0]} \|.*\n", text, re.M)
    if header in text and old:
        page.write_text(text.replace(old[0], new))
    else:
        page.write_text(text + header + rule + new)


def line_of(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("oldest", "tested", "newest"))
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter (default: the one that runs this)"
    )
    parser.add_argument(
        "--venv", type=Path, help="keep the environment in this folder, and use it if it exists"
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        default=ROOT / "CONTRIBUTING.md",
        help="write the row into the table of this file (default: CONTRIBUTING.md)",
    )
    args = parser.parse_args()
    with TemporaryDirectory(prefix="lockstep-versions-") as name:
        folder = Path(name)
        venv, results = (args.venv or folder / "venv").absolute(), folder / "tests.xml"
        chosen = [f"VENV={venv}", f"PYTHON={args.python}"]
        chosen.append(f"CONSTRAINTS={constraints(args.kind, folder)}")
        code = make("train", *chosen, f"ARGS=--output_dir {folder / 'runs'}")
        code = code or make("test", *chosen, f"ARGS=--junitxml {results}")
        if results.exists():
            cells = row(args.kind, venv, results)
            print(line_of(HEADER) + line_of(cells), end="")
            write_row(args.table, cells)
        return code


if __name__ == "__main__":
    sys.exit(main())
