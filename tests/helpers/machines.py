"""Machines of a network, made of Linux network namespaces.

Each has its own host name, hosts file and interfaces. They share the disk and the processors.
`eth0` of each leads to a switch, 10.77.0.0/24; `docker0` is a bridge that leads
nowhere, with the same address on all, as Docker makes it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_SWITCH = f"ls-switch-{os.getpid()}"
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def why_not() -> str:
    """Why no machines can be made here; empty when they can."""
    missing = [tool for tool in ("ip", "nft", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2, nftables, util-linux)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True
    )
    return (
        f"network namespaces are not allowed here: {probe.stderr.strip()}"
        if probe.returncode
        else ""
    )


needs_machines = pytest.mark.skipif(why_not() != "", reason=why_not() or "-")


@dataclass
class Job:
    """A command that runs on a machine, and what it has written to its file so far."""

    process: subprocess.Popen
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code; fails with what was written when it does not end in time."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"{self.output.name} still runs after {seconds:.0f} s:\n{self.text[-3000:]}"
            )

    def lines(self, start: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(start)]


@dataclass
class Machine:
    """A machine of the network, by its host name, at its address on `eth0`."""

    name: str
    address: str
    folder: Path
    jobs: list[Job] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        """What Linux knows it by; other tests may run at the same time."""
        return f"{self.name}-{os.getpid()}"

    @property
    def _inside(self) -> str:
        return f"nsenter --net=/run/netns/{self.namespace}"

    @property
    def hosts(self) -> Path:
        """What it sees as /etc/hosts."""
        return self.folder / f"hosts-{self.name}"

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> Job:
        """Start a command of this environment's bin folder, with the variables in addition to the
        test's own.
        """
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("OMP_", "ACCELERATE_", "GLOO_", "NCCL_"))
        }
        output = self.folder / f"{self.name}-{len(self.jobs)}.txt"
        inside = [*self._inside.split(), "unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh"]
        program, *given = command
        with output.open("w") as file:
            process = subprocess.Popen(
                [*inside, self.name, str(self.hosts), str(BIN / program), *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=clean | (env or {}),
                start_new_session=True,
            )
        self.jobs.append(Job(process, output))
        return self.jobs[-1]

    def processes(self, script: str = "train.py") -> list[psutil.Process]:
        """What runs the script on it now: the ranks, not their launchers."""
        found = []
        for pid in map(int, run_command(f"ip netns pids {self.namespace}").split()):
            with suppress(psutil.Error):
                words = [Path(word).name for word in psutil.Process(pid).cmdline()]
                # python -u train.py
                if words and words[0].startswith("python") and script in words[1:3]:
                    found.append(psutil.Process(pid))
        return found

    def cut(self) -> None:
        """Pull the plug out at the switch."""
        run_command(f"ip -n {_SWITCH} link set {self.name} down")

    def heal(self) -> None:
        run_command(f"ip -n {_SWITCH} link set {self.name} up")

    def firewall(self, rule: str) -> None:
        """Let nft judge what comes in, such as `drop` or `numgen random mod 100 < 20 drop`; what it
        sends passes.
        """
        chain = "chain inet tests in { type filter hook input priority 0 ; }"
        for what in ("table inet tests", chain, f"rule inet tests in iifname eth0 {rule}"):
            run_command(f"{self._inside} nft add {what}")

    def dropped(self) -> int:
        """The packets that matched rules with a counter, such as `numgen random mod 100 < 20
        counter drop`.
        """
        rules = run_command(f"{self._inside} nft list chain inet tests in")
        return sum(map(int, re.findall(r"counter packets (\d+)", rules)))

    def end(self) -> None:
        """Kill all that runs on it, which is only what was started here, and take it away."""
        for _ in range(50):
            pids = run_command(f"ip netns pids {self.namespace}", check=False).split()
            if not pids:
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for job in self.jobs:
                job.process.poll()
            time.sleep(0.1)
        for job in self.jobs:
            job.process.wait()
        run_command(f"ip netns del {self.namespace}", check=False)


@contextmanager
def network(folder: Path, count: int = 2):
    """Yield machines ls-a, ls-b and so on, that know each other's names, and end them."""
    machines = [Machine(f"ls-{chr(97 + n)}", f"10.77.0.{n + 1}", folder) for n in range(count)]
    hosts = "127.0.0.1 localhost\n" + "".join(
        f"{machine.address} {machine.name}\n" for machine in machines
    )
    try:
        run_command(f"ip netns add {_SWITCH}")
        run_command(f"ip -n {_SWITCH} link add switch type bridge")
        run_command(f"ip -n {_SWITCH} link set switch up")
        for machine in machines:
            machine.hosts.write_text(hosts)
            _plug_in(machine)
        yield machines
    finally:
        for machine in machines:
            machine.end()
        run_command(f"ip netns del {_SWITCH}", check=False)


def _plug_in(machine: Machine) -> None:
    name, plug = machine.namespace, machine.name
    run_command(f"ip netns add {name}")
    run_command(f"ip link add eth0 netns {name} type veth peer name {plug} netns {_SWITCH}")
    run_command(f"ip -n {_SWITCH} link set {plug} master switch up")
    run_command(f"ip -n {name} link add docker0 type bridge")
    for interface, address in (
        ("lo", ""),
        ("eth0", f"{machine.address}/24"),
        ("docker0", "172.17.0.1/16"),
    ):
        if address:
            run_command(f"ip -n {name} addr add {address} dev {interface}")
        run_command(f"ip -n {name} link set {interface} up")
    run_command(f"ip -n {name} route add default dev eth0")


def run_command(command: str, check: bool = True) -> str:
    result = subprocess.run(command.split(), capture_output=True, text=True)
    assert not check or result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout
