"""Run `make train` and the quick tests with other versions of libraries, in a new environment.

    python3 tests/versions.py oldest --python python3.11

oldest: the lower bounds in requirements.txt and requirements-dev.txt. tested: constraints.txt.
newest: the newest versions that both files allow. Except with `tested`, dependencies of these
packages have the newest version that fits.

Prints a table with one row; the exit code is that of `make`. Needs Python, make and network. The
environment takes 7 GB in a temporary folder (`TMPDIR`), which is deleted at the end unless --venv
names another place.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("torch", "torchvision", "accelerate", "datasets")
HEADER = ("Versions", "Python", *SHOWN, "Passed", "Failed", "Skipped", "Minutes")


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
    failed, minutes = errors + failures, float(suite.get("time", 0)) / 60
    counts = total - failed - skipped, failed, skipped, round(minutes)
    return [kind, *installed, *map(str, counts)]


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
    parser.add_argument("--table", type=Path, metavar="FILE", help="also append the table to FILE")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="lockstep-versions-") as name:
        folder = Path(name)
        venv, results = (args.venv or folder / "venv").absolute(), folder / "tests.xml"
        chosen = [f"VENV={venv}", f"PYTHON={args.python}"]
        chosen.append(f"CONSTRAINTS={constraints(args.kind, folder)}")
        code = make("train", *chosen, f"ARGS=--output_dir {folder / 'runs'}")
        code = code or make("test", *chosen, f"ARGS=--junitxml {results}")
        if results.exists():
            lines = HEADER, ["---"] * len(HEADER), row(args.kind, venv, results)
            table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
            print(table, end="")
            if args.table:
                with args.table.open("a") as file:
                    file.write(table)
        return code


if __name__ == "__main__":
    sys.exit(main())
