"""Check everything that needs a GPU, in parts of less than ten minutes each. No network is needed.

    python3 tests/gpu/run.py                    all parts; `make gpu` does the same
    python3 tests/gpu/run.py runs               one of them; its rows are added to the table of the earlier ones
    python3 tests/gpu/run.py --list             the parts, the most important first

The table is written to gpu.md and gpu.json in --report after each check. Checks that are not
complete after nine and a half minutes fail or are skipped; a dry run on CPUs has an hour, so that
it skips none for lack of time.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
ON_CPU = os.environ.get("LOCKSTEP_GPU_TESTS_ON_CPU") == "1"
SECONDS = 3600 if ON_CPU else 570
WORKERS = ["-n", str(min(8, max(2, len(os.sched_getaffinity(0)) // 2))), "--dist", "worksteal"]
RUNS = ["tests/gpu/test_runs_on_gpus.py", "tests/gpu/test_faults_on_gpus.py", *WORKERS]
SPEED = "tests/gpu/test_speed_on_gpus.py"
# Minutes on one H100 with 16 cores, as estimated; what the part answers; pytest's arguments. Speed
# is measured alone.
PARTS = {
    "runs": (5, "right numbers: CPU, precisions, two ranks, same bits, resume, faults", RUNS),
    "peers": (
        6,
        "speed and memory beside timm and a bare step",
        [SPEED, "-k", "as_fast and not photographs"],
    ),
    "photographs": (
        7,
        "do photographs arrive in time; speed beside timm's loader",
        [SPEED, "-k", "photographs"],
    ),
    "sharding": (
        4,
        "FSDP2: losses of DDP, checkpoints, offload, memory and speed",
        ["tests/gpu/test_sharding_on_gpus.py"],
    ),
    "waits": (
        5,
        "does the host or the GPU wait for anything",
        [SPEED, "-k", "not as_fast and not photographs"],
    ),
}


def say_missing() -> None:
    """Print which packages are missing, and how to bring them to a machine without a network."""
    tested = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    missing = [name for name in tested if name not in ("mpich", "coverage") and not _has(name)]
    fetch = "pip download --no-deps --only-binary=:all: --python-version {}.{} -d wheels".format(
        *sys.version_info
    )
    if missing:
        pinned = " ".join(f"{name}=={tested[name]}" for name in missing)
        install = "pip install --no-index --no-deps --target /tmp/site wheels/*.whl && export PYTHONPATH=/tmp/site"
        print(
            f"missing: {', '.join(missing)}; with a network: {fetch} {pinned}; then here: {install}",
            flush=True,
        )


def _has(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=ROOT / "build",
        help="folder of the table (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print the parts")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{unknown.pop()}: the parts are {', '.join(PARTS)}")
    if args.list:
        print(
            "\n".join(
                f"{name:12} {minutes} minutes  {answers}"
                for name, (minutes, answers, _) in PARTS.items()
            )
        )
        return
    say_missing()
    codes = []
    for name in args.parts or PARTS:
        env = {
            "LOCKSTEP_GPU_REPORT": str(args.report.absolute()),
            "LOCKSTEP_GPU_UNTIL": str(time.time() + SECONDS),
        }
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            *PARTS[name][2],
        ]
        words += WORKERS if ON_CPU else []
        codes.append(subprocess.run(words, cwd=ROOT, env=os.environ | env).returncode)
    table = args.report / "gpu.md"
    print(table.read_text() if table.exists() else f"no check ended, so there is no {table}")
    raise SystemExit(int(any(codes)))  # a part that was killed has a negative code


if __name__ == "__main__":
    main()
