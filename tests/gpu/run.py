"""Check everything that needs a GPU, in parts of less than ten minutes each. No network is needed.

    python3 tests/gpu/run.py                         all parts; `make gpu` does the same
    python3 tests/gpu/run.py first --seconds 415     start with this call on one GPU,
    python3 tests/gpu/run.py speed --seconds 285     and with this one: 15 minutes in total
    python3 tests/gpu/run.py --list                  the parts: what they need, how long they take

First it finds out whether two ranks can use NCCL, also on one GPU. A table is written to gpu.md and
gpu.json in --report after each check, and the output to gpu.log. A check that exceeds its own limit
fails; one that the end of its part cuts off is "not finished", and one without time to start is
skipped. Dry runs on CPUs get an hour per part.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).parents[2]
ON_CPU = os.environ.get("LOCKSTEP_GPU_TESTS_ON_CPU") == "1"
SECONDS = 3600 if ON_CPU else 570
WORKERS = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
SMOKE, RUNS, FAULTS, SHARDING, SPEED, STEPS = (
    f"tests/gpu/test_{name}_on_gpus.py"
    for name in ("smoke", "runs", "faults", "sharding", "speed", "steps")
)


@dataclass
class PytestCall:
    """One call of pytest: files and marks choose the checks. `over`: the backend under test."""

    title: str
    files: list[str]
    marks: str = "gpu"
    share: float = 1.0  # of the part's seconds; a dry run has no such limit
    workers: int = 1  # checks at a time; speed is measured alone
    over: str = ""


@dataclass
class Part:
    """A group of calls: minutes on an H100 with 16 cores (estimated), needs, answers."""

    minutes: int
    needs: str
    answers: str
    calls: list[PytestCall]
    two_ranks: bool = True  # needs the backend of two ranks


PARTS = {
    "first": Part(
        7,
        "one GPU, 16 cores; NCCL 2.30 to share the GPU (--nccl)",
        "the most important checks: two ranks over NCCL, FSDP2, equal bits, lost ranks; photos",
        [
            PytestCall("two ranks", [RUNS, SHARDING, FAULTS], "gpu and first", 0.52, 5, "nccl"),
            PytestCall("failed in the first GPU run", [RUNS], "gpu and rerun", 0.38, 6, "gloo"),
            PytestCall("photographs and cached features", [SPEED], "gpu and first", 0.4),
        ],
    ),
    "speed": Part(
        5,
        "one GPU; CIFAR-10 (--cifar10)",
        "CUDA graphs, cuDNN's kernel search, timm, compiled models, CIFAR-10",
        [PytestCall("updates", [STEPS])],
        two_ranks=False,
    ),
    "runs": Part(
        5,
        "one GPU",
        "right numbers: CPU, precisions, two ranks, same bits, resume, faults",
        [PytestCall("runs", [RUNS, FAULTS], workers=WORKERS)],
    ),
    "peers": Part(
        6,
        "one GPU; two for DataParallel",
        "speed and memory beside timm and a bare step",
        [PytestCall("peers", [SPEED], "gpu and peers")],
        two_ranks=False,
    ),
    "photographs": Part(
        7,
        "one GPU, many cores",
        "do photographs arrive in time; speed beside timm's loader",
        [PytestCall("photographs", [SPEED], "gpu and photographs")],
        two_ranks=False,
    ),
    "sharding": Part(
        4,
        "two GPUs, or one and NCCL 2.30",
        "FSDP2: losses of DDP, checkpoints, offload, memory and speed",
        [PytestCall("sharding", [SHARDING])],
    ),
    "waits": Part(
        5,
        "one GPU; two for the exchange",
        "does the host or the GPU wait for anything",
        [PytestCall("waits", [SPEED], "gpu and waits")],
    ),
}
START_WITH = """Start with these two calls, which take a quarter of an hour in total:
python3 tests/gpu/run.py first --seconds 415 --wheels DIR --nccl FILE
python3 tests/gpu/run.py speed --seconds 285"""
GLOO = {"backend": "gloo", "reason": "no check needs two ranks", "settings": {}, "code": 0}
# what the parts import; their versions are in constraints.txt
PACKAGES = """accelerate datasets dill evaluate filelock fsspec huggingface_hub Jinja2 joblib
matplotlib multiprocess numpy packaging pandas pillow psutil pyarrow PyYAML requests safetensors
scikit-learn scipy threadpoolctl tqdm typing_extensions xxhash execnet pytest pytest-xdist
timm""".split()  # noqa: SIM905


class Log:
    """Print lines and keep them in a file."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.file.write(f"{text}\n")
        self.file.flush()


def say_missing(log: Log) -> None:
    """Print which packages are missing, and how to bring them to a machine without a network."""
    tested = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    missing = [name for name in PACKAGES if not _has(name)]
    fetch = "pip download --no-deps --only-binary=:all: --python-version {}.{} -d wheels".format(
        *sys.version_info
    )
    if missing:
        pinned = " ".join(f"{name}=={tested[name]}" for name in missing)
        log.say(
            f"missing: {', '.join(missing)}; with a network: {fetch} {pinned}; "
            "then: run.py --wheels wheels"
        )


def _has(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def install_wheels(folder: Path, site: Path) -> None:
    """Install the wheels of a folder for this call only, without a network."""
    wheels = [str(path) for path in sorted(folder.glob("*.whl"))]
    if not wheels:
        raise SystemExit(f"run.py: error: --wheels {folder} has no .whl file")
    quiet = shlex.split("-m pip install -q --no-index --no-deps --no-compile --no-cache-dir")
    subprocess.run([sys.executable, *quiet, "--target", str(site), *wheels], check=True)
    sys.path.insert(0, str(site))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{site}:{before}" if before else str(site)


def unpack_nccl(file: Path, folder: Path) -> str:
    """Decompress NCCL's library if it is .xz; return its path."""
    if file.suffix != ".xz":
        return str(file.absolute())
    import lzma
    import shutil

    folder.mkdir()
    target = folder / "libnccl.so.2"
    with lzma.open(file) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return str(target)


def row_name(nodeid: str) -> str:
    """What the table calls a check."""
    return nodeid.split("::", 1)[1].removeprefix("test_").replace("_", " ")


def write_about(args: argparse.Namespace, library: dict[str, str], log: Log) -> int:
    """Write about.json: command, commit, machine, versions, checks. Returns how many GPUs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    env = os.environ | library  # its version is that of the library that runs
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "tests/gpu"]
    with (
        subprocess.Popen([sys.executable, "tests/gpu/about.py"], env=env, **pipes) as asked,
        subprocess.Popen([*collect, "-p", "no:cacheprovider"], **pipes) as listing,
    ):
        out, err = asked.communicate()
        names, _ = listing.communicate()
    if asked.returncode:
        raise SystemExit(f"run.py: error: about.py failed\n{err[-3000:]}")
    checks = [row_name(line) for line in names.splitlines() if "::" in line]
    if listing.returncode:
        log.say(f"pytest cannot list the checks: {names[-3000:]}")
        checks = []
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = None
    with suppress(OSError, subprocess.CalledProcessError):  # a copy without the repository
        commit = subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    found = json.loads(out.splitlines()[-1])
    path = args.report / "about.json"
    about = {
        "command": commands(path, found["machine"]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "dry_run": ON_CPU,
        "checks": checks,
    } | found
    path.write_text(json.dumps(about, indent=1) + "\n")
    os.environ["LOCKSTEP_GPU_COUNT"] = str(about["gpus"])
    os.environ["LOCKSTEP_GPU_MACHINE"] = about["machine"]
    os.environ["LOCKSTEP_GPU_SHARED"] = "1" if about["gpus"] == 1 else "0"
    log.say(about["machine"])
    return about["gpus"]


def commands(path: Path, machine: str) -> str:
    """This command, after those of the same machine and code whose rows the table keeps."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    said = earlier["command"].split("; ") if earlier.get("machine") == machine else []
    command = shlex.join(["python3", "tests/gpu/run.py", *sys.argv[1:]])
    return "; ".join([each for each in said if each != command] + [command])


def decide(until: float, library: dict[str, str], log: Log, work: Path) -> dict:
    """Choose the backend of two ranks, and its settings; say why."""
    file = work / "decision.json"
    env = {"LOCKSTEP_GPU_DECISION": str(file)} | library
    call = PytestCall("do two ranks communicate over NCCL", [SMOKE])
    left = until - time.time()
    code = run_call(call, until if ON_CPU else time.time() + 0.3 * left, env, log)
    decision = GLOO | {"reason": "the check of NCCL did not finish"}
    if file.exists():
        decision = json.loads(file.read_text())
    log.say(f"two ranks use {decision['backend']}: {decision['reason']}")
    return decision | {"code": code}


def run_part(part: Part, until: float, decision: dict, library: dict[str, str], log: Log) -> int:
    """Run the calls of a part within the time; returns 0 if nothing failed."""
    code, left, calls = 0, until - time.time(), part.calls
    if decision["backend"] == "gloo":
        calls = without_nccl(calls)
    for call in calls:
        env = {"LOCKSTEP_GPU_BACKEND": "gloo", "LOCKSTEP_GPU_BACKEND_REASON": decision["reason"]}
        if call.over == "gloo":
            env["LOCKSTEP_GPU_BACKEND_REASON"] = "this step tests gloo"
        elif decision["backend"] == "nccl":
            env |= {"LOCKSTEP_GPU_BACKEND": "nccl"} | library | decision["settings"]
        end = until if ON_CPU else min(until, time.time() + call.share * left)
        code |= run_call(call, end, env, log)
    return code


def without_nccl(calls: list[PytestCall]) -> list[PytestCall]:
    """Put the calls about NCCL last, without the checks that another call has run over gloo."""
    last = [
        replace(call, marks=f"{call.marks} and not rerun", share=1.0)
        for call in calls
        if call.over == "nccl"
    ]
    return [call for call in calls if call.over != "nccl"] + last


def run_call(call: PytestCall, until: float, env: dict[str, str], log: Log) -> int:
    """Run pytest on a call's checks; returns 0 if none failed. Those without time are skipped."""
    sys.path.append(str(ROOT / "benchmarks"))
    from common import kill  # needs packages that --wheels may have brought

    log.say(f"== {time.strftime('%H:%M:%S')} {call.title}, {max(0.0, until - time.time()):.0f} s")
    words = [sys.executable, "-m", "pytest", "-m", call.marks, "-p", "no:cacheprovider"]
    words += ["-vv", "-rfEs", "--tb=short", *call.files]
    workers = min(call.workers, WORKERS)
    if ON_CPU and call.files != [SMOKE]:
        workers = WORKERS
    if workers > 1:  # each worker takes two checks, then one at a time
        words += ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1"]
    env = os.environ | env | {"LOCKSTEP_GPU_UNTIL": str(until), "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=env, errors="replace", **pipes) as process:
        # watchdog for checks that hang
        clock = Timer(max(30.0, until - time.time() + 15), kill, [process.pid])
        clock.start()
        try:
            for line in process.stdout:
                log.say(line.rstrip("\n"))
            code = process.wait()
        finally:
            clock.cancel()
    return int(code != 0)  # negative if killed, 5 if no check matches


def listed() -> str:
    """List the parts, with what each needs, takes and answers."""
    lines = [
        f"{name:12} {part.minutes} minutes (estimated); needs {part.needs}; {part.answers}"
        for name, part in PARTS.items()
    ]
    return "\n".join([*lines, "", START_WITH])


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path(os.environ.get("OUT") or ROOT / "build"),
        help="folder of the table (default: $OUT, or build)",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="limit of each part (default: %(default)s)"
    )
    parser.add_argument("--wheels", type=Path, help="folder of packages to install for this call")
    parser.add_argument("--nccl", type=Path, help="libnccl.so.2, or its .xz, for two ranks")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10's parquet files")
    parser.add_argument("--list", action="store_true", help="print the parts")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{unknown.pop()}: the parts are {', '.join(PARTS)}")
    for path in filter(None, (args.wheels, args.nccl, args.cifar10)):
        if not path.exists():
            parser.error(f"{path} does not exist")
    args.report = args.report.absolute()
    return args


def main() -> None:
    args = read_flags()
    if args.list:
        print(listed())
        return
    begun = time.time()
    log = Log(args.report / "gpu.log")
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        work = Path(folder)
        if args.wheels:
            install_wheels(args.wheels, work / "site")
        say_missing(log)
        library = {"LD_PRELOAD": unpack_nccl(args.nccl, work / "nccl")} if args.nccl else {}
        os.environ["LOCKSTEP_GPU_REPORT"] = str(args.report)
        if args.cifar10:
            os.environ["LOCKSTEP_GPU_CIFAR10"] = str(args.cifar10.absolute())
        gpus = write_about(args, library, log)
        names, decision = args.parts or list(PARTS), GLOO
        if (gpus or ON_CPU) and any(PARTS[name].two_ranks for name in names):
            decision = decide(begun + args.seconds, library, log, work)
        code = decision["code"]
        for number, name in enumerate(names):
            until = (begun if number == 0 else time.time()) + args.seconds
            code |= run_part(PARTS[name], until, decision, library, log)
    table = args.report / "gpu.md"
    print(table.read_text() if table.exists() else f"no check finished, so there is no {table}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
