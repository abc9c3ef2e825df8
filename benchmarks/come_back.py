"""How long an elastic run takes to come back after a machine has joined it, left it or disappeared, by stage.

    python benchmarks/come_back.py --mnist DIR --json FILE                    MNIST's parquet files in DIR, five rounds
    python benchmarks/come_back.py --mnist DIR --before CHECKOUT              in turns with another checkout

Two launchers on this machine stand for two machines, with one rank each, and a third process serves the store of their
rendezvous. They train recipes/mnist.yaml with the command of docs/elastic.md. Each round has three events:

* joined: the second launcher starts. Its own imports do not count: the time begins when it starts its rank.
* notice: the second launcher gets SIGTERM, as from a cloud that takes the machine back.
* lost: the second launcher and its rank are killed with SIGKILL.

A stage lasts until the slowest rank has finished it. The whole time ends with the first update of the new ranks.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

BEGUN = time.time()  # when this process started, before the slow imports
ROOT = Path(__file__).resolve().parent.parent
EVENTS = ("joined", "notice", "lost")
STAGES = {  # the event that ends each stage; the first two are those of the ranks that end
    "signal or error, last update, save": "train",
    "end of the processes": "exited",
    "heartbeats, rendezvous of the launchers": "begun",
    "imports": "imported",
    "ranks connect": "join",
    "checkpoint found and verified": "newest",
    "data": "make_datasets",
    "model, optimizer, checkpoint loaded": "build",
    "first update": "train_update",
}
CONF = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3"
SERVE = "import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
SERVE += "print(s.port, flush=True); time.sleep(3600)"


def run_rank(folder: Path, root: Path, argv: list[str]) -> None:
    """Train with these arguments; append the times of the stages to a file in `folder`."""
    sys.path.insert(0, str(root))
    with (folder / f"rank-{os.getpid()}.jsonl").open("a", buffering=1) as file:

        def note(name: str, at: float) -> None:
            file.write(json.dumps([name, at]) + "\n")

        def noting(owner: object, name: str) -> None:
            function, noted = getattr(owner, name), []

            def call(*arguments, **keywords):
                try:
                    return function(*arguments, **keywords)
                finally:
                    if not noted:
                        note(name, time.time())
                        noted.append(name)

            setattr(owner, name, call)

        note("begun", BEGUN)
        import train

        note("imported", time.time())
        for owner, name in ((train.Ranks, "join"), (train.CheckpointManager, "newest"), (train, "make_datasets"),
                            (train, "build"), (train, "train_update"), (train, "train")):  # fmt: skip
            noting(owner, name)
        train.main(argv)


def times_of(folder: Path, pid: int) -> dict[str, float]:
    """When the rank with this process number has finished its stages so far."""
    file = folder / f"rank-{pid}.jsonl"
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


class Launchers:
    """Two launchers of one run."""

    def __init__(self, folder: Path, root: Path, settings: list[str]):
        self.folder, self.root, self.settings = folder, root, settings
        self.store = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        self.port = int(self.store.stdout.readline())
        self.running: list[subprocess.Popen] = []

    def start(self) -> None:
        from common import flags

        options = flags(nnodes="1:2", nproc_per_node=1, max_restarts=100, rdzv_backend="c10d", rdzv_id="run")
        options += flags(rdzv_endpoint=f"127.0.0.1:{self.port}", rdzv_conf=f"is_host=0,{CONF}")
        command = [str(Path(sys.executable).with_name("torchrun")), *options]
        command += [__file__, "--rank", str(self.folder), str(self.root), *self.settings]
        shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
        with (self.folder / f"launcher-{len(self.running)}.txt").open("a") as out:
            self.running.append(subprocess.Popen(command, env=os.environ | shared, stdout=out, stderr=out))

    def ranks(self) -> list[int]:
        """The process numbers of the ranks, in the order of the launchers."""
        import psutil

        children = [child for each in self.running for child in psutil.Process(each.pid).children()]
        return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]

    def wait_until(self, count: int, other_than: set[int] = frozenset()) -> list[int]:
        """Wait until that many ranks, none of them one of `other_than`, have finished an update; returns them."""
        deadline = time.time() + 300
        while time.time() < deadline:
            ranks = [pid for pid in self.ranks() if pid not in other_than]
            if len(ranks) == count and all("train_update" in times_of(self.folder, pid) for pid in ranks):
                return ranks
            time.sleep(0.05)
        raise SystemExit("\n".join(file.read_text()[-3000:] for file in self.folder.glob("launcher-*.txt")))

    def end(self) -> None:
        import psutil

        for launcher in [*self.running, self.store]:
            for process in [*psutil.Process(launcher.pid).children(), launcher]:
                process.kill()
            launcher.wait()


@contextmanager
def launchers(root: Path, settings: list[str]) -> Iterator[Launchers]:
    with TemporaryDirectory(prefix="lockstep-") as folder:
        both = Launchers(Path(folder), root, [*settings, "--output_dir", folder])
        try:
            yield both
        finally:
            both.end()


def measure(root: Path, settings: list[str]) -> dict[str, dict[str, float]]:
    """The seconds of each stage, by event."""
    found = {}
    with launchers(root, settings) as both:
        both.start()
        ranks = both.wait_until(1)
        for event in ("joined", "notice", "joined", "lost"):
            time.sleep(3)
            if event == "joined":
                both.start()
                began = None
            else:
                began = time.time()
                victim = both.running[-1]
                if event == "notice":
                    victim.terminate()
                else:
                    os.kill(ranks[-1], signal.SIGKILL)
                    victim.kill()
                victims = both.running.pop()
            survivor = ranks[0]
            exited = wait_for_exit(survivor)
            new = both.wait_until(1 + (event == "joined"), set(ranks))
            if event != "joined":
                victims.wait()
            at = {name: max(times_of(both.folder, pid)[name] for pid in new) for name in times_of(both.folder, new[0])}
            old = times_of(both.folder, survivor)
            at |= {"train": old["train"], "exited": exited}
            # A launcher that joins is noticed when the others poll, about a second after it has joined.
            now = began or old["train"]
            whole = at["train_update"] - now
            seconds = {}
            for stage, name in STAGES.items():
                seconds[stage], now = max(0.0, at[name] - now), max(now, at[name])
            found[event] = seconds | {"whole": whole}
            ranks = new
    return found


def wait_for_exit(pid: int) -> float:
    """Wait until the process has ended, reaped or not; returns when."""
    import psutil

    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    return time.time()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    from common import flags, in_turns, make_parser, report, spread

    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--mnist", type=Path, metavar="DIR", required=True, help="MNIST's parquet files")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    args = parser.parse_args()
    settings = flags(config=ROOT / "recipes/mnist.yaml", data=args.mnist, run_name="run", resume="auto")
    settings += flags(microbatches=4, epochs=1000, save_seconds=5, log_every=1)
    sides = {"now": partial(measure, ROOT, settings)}
    if args.before:
        sides["before"] = partial(measure, args.before.resolve(), settings)
    results = in_turns(sides, args.rounds)
    rows = [
        [stage, *(spread([each[event][stage] for each in results[side]], ".1f") for event in EVENTS for side in sides)]
        for stage in [*STAGES, "whole"]
    ]
    report(args, ["Seconds", *(f"{event}, {side}" for event in EVENTS for side in sides)], rows, results)


if __name__ == "__main__":
    main()
