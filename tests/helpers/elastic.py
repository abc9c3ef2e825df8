"""Launchers of an elastic run, here or on machines of namespaces, and what can happen."""

import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from helpers.launched_runs import end_commands, ranks_of
from helpers.machines import Machine
from helpers.ranks import free_port
from helpers.training_runs import BIN, ROOT, clean_environment, words
from helpers.waiting import records_so_far, until

_SERVE = (
    "import sys, time, torch.distributed as d; "
    "s = d.TCPStore('0.0.0.0', int(sys.argv[1]), is_master=True, "
    "wait_for_workers=False); print('serving', flush=True); time.sleep(10000)"
)
# as in docs/clusters.md
_FILE = "store_type=file,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"
_SERVED = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5"
_SERVED += ",last_call_timeout=3,join_timeout=60,read_timeout=20"
TIMEOUT = 20  # seconds, of --timeout
SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}


class Launchers:
    """The launchers of a run, each of which starts one rank. Up to `most` may run at a time.

    They meet in a file, or, if `served`, in a store that another process serves.
    """

    def __init__(
        self, flags: list[str], served: bool, machines: list[Machine] | None = None, most: int = 3
    ):
        self.flags, self.most, self.machines = flags, most, machines
        self.alive: dict[int, subprocess.Popen] = {}  # by the number of the machine
        self.cut: dict[int, subprocess.Popen] = {}  # those whose machine has no network
        self.started: list[subprocess.Popen] = []
        self.outputs: list[Path] = []
        self.rendezvous = ["--rdzv_endpoint", str(Path("store").absolute()), "--rdzv_conf", _FILE]
        if served:
            self.start_store()

    def start_store(self) -> None:
        """Serve the store of the rendezvous.

        Launchers run on machines 1 and up, the store on machine 0.
        """
        port = free_port()
        self.store, output = self._run(0, sys.executable, "-c", _SERVE, str(port))
        until(lambda: "serving" in output.read_text())
        address = self.machines[0].address if self.machines else "127.0.0.1"
        self.rendezvous = ["--rdzv_endpoint", f"{address}:{port}", "--rdzv_conf", _SERVED]

    def _run(self, machine: int, *command: str) -> tuple[subprocess.Popen, Path]:
        if self.machines:
            job = self.machines[machine].start(*command, env=SHARED)
            process, output = job.process, job.output
        else:
            output = Path(f"launcher-{len(self.outputs)}.txt").absolute()
            env = clean_environment() | SHARED
            with output.open("w") as file:
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        self.outputs.append(output)
        self.started.append(process)
        return process, output

    def start(self) -> None:
        """Start a launcher on a free machine."""
        machine = next(number for number in range(1, self.most + 1) if number not in self.alive)
        if machine in self.cut:  # the machine is started anew
            end_commands([self.cut.pop(machine)])
            self.machines[machine].heal()
        command = words(f"{BIN}/torchrun --nnodes 1:{self.most} --nproc_per_node 1")
        command += words("--max_restarts 1000 --rdzv_backend c10d --rdzv_id run")
        command += self.rendezvous
        command += [f"{ROOT}/train.py", *self.flags]
        self.alive[machine], _ = self._run(machine, *command)

    def rank(self, machine: int) -> psutil.Process | None:
        """The rank that this launcher has started last."""
        launcher = self.alive[machine]
        return next((rank for rank in ranks_of(launcher) if rank.pid != launcher.pid), None)

    def reap(self) -> list[int]:
        """Forget launchers that have exited; returns their exit codes."""
        ended = {
            machine: code for machine, p in self.alive.items() if (code := p.poll()) is not None
        }
        for machine in ended:
            del self.alive[machine]
        return list(ended.values())

    def happen(self, event: str, chance: random.Random) -> None:
        """Apply one of the events to a random launcher."""
        machine = chance.choice(sorted(self.alive))
        launcher, rank = psutil.Process(self.alive[machine].pid), self.rank(machine)
        with suppress(psutil.NoSuchProcess, AttributeError):  # it has just exited by itself
            if event == "launcher added":
                self.start()
            elif event == "rank killed":
                rank.kill()
            elif event == "rank stopped":
                rank.send_signal(signal.SIGSTOP)
                threading.Timer(2 * TIMEOUT, _continue, [rank]).start()
            elif event == "SIGTERM to a launcher":
                launcher.send_signal(signal.SIGTERM)
            elif event == "launcher killed":
                launcher.kill()
            elif event == "machine lost":
                with suppress(psutil.NoSuchProcess, AttributeError):
                    rank.kill()
                launcher.kill()
            elif event == "store lost":
                self.store.kill()
                self.store.wait()
            elif event == "all machines lost":
                for each in [*filter(None, map(self.rank, self.alive)), *self.alive.values()]:
                    each.kill()
            elif event == "network cut":
                self.machines[machine].cut()
                self.cut[machine] = self.alive.pop(machine)
        if event in ("SIGTERM to a launcher", "launcher killed", "machine lost"):
            self.alive.pop(machine).wait(timeout=90)

    def end(self) -> None:
        for process in self.started:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        child.kill()
        end_commands(self.started)


def _continue(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


EVENTS = (
    "launcher added",
    "rank killed",
    "rank stopped",
    "SIGTERM to a launcher",
    "launcher killed",
    "machine lost",
)
BETWEEN_MACHINES = (*EVENTS, "network cut", "network cut")


def possible(event: str, launchers: Launchers) -> bool:
    """Whether the event can happen now, with at least one launcher left and a rank that others wait
    for.
    """
    if event == "launcher added":
        return len(launchers.alive) < launchers.most
    return event in ("rank killed", "store lost", "all machines lost") or len(launchers.alive) > 1


def wait_for_progress(log: Path, after: int, more: int, launchers: Launchers) -> None:
    """Wait until all launchers train together and have logged `more` updates, or until all have
    exited.

    They must have started again after the first `after` records of the log, or have logged 50 more:
    the event may have hit a launcher that had not joined yet.
    """

    def progressed() -> bool:
        launchers.reap()
        read = records_so_far(log)
        starts = [number for number, record in enumerate(read) if record["kind"] == "start"]
        if not starts or read[starts[-1]]["processes"] != len(launchers.alive):
            return not launchers.alive
        return len(read) - starts[-1] > more and (starts[-1] >= after or len(read) > after + 50)

    until(progressed, every=0.2)
