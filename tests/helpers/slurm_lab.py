"""A SLURM cluster of two nodes here, each with a network, a host name and a process table.

    python -m helpers.slurm_lab    # starts it, says how to use it, and takes it away at Enter

Needs root and the packages slurm-wlm, munge and iproute2. SLURM is told that each node has 16 cores
and 2 GPUs; the GPUs are /dev/null, enough to deal them out. The partition `low` is preempted by
`high`.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.machines import run_command
from helpers.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
NODES = ("slm1", "slm2")
# slm0 is where the controller runs
_ADDRESSES = {"slm0": "10.79.0.10", "slm1": "10.79.0.11", "slm2": "10.79.0.12"}
_BRIDGE, _OWN_ADDRESS = "slmbr", "10.79.0.1/24"
_CONF = """
ClusterName=lockstep
SlurmctldHost=slm0(10.79.0.10)
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=15
KillWait={kill_wait}
NodeName=slm1 NodeAddr=10.79.0.11 CPUs=16 Gres=gpu:2
NodeName=slm2 NodeAddr=10.79.0.12 CPUs=16 Gres=gpu:2
PartitionName=low Nodes=slm[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=abrupt Nodes=slm[1-2] PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=slm[1-2] PriorityTier=9 PreemptMode=OFF
"""
# The shell is process 1 of the node: it takes in what SLURM leaves behind, and all end with it.
_NODE = "hostname {name} && mount --bind {folder}/hosts /etc/hosts"
_NODE += " && {daemon} -D -f {folder}/slurm.conf & wait"


def why_not() -> str:
    """Why no cluster can be started here; empty when it can."""
    tools = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter")
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge iproute2"
    return "needs root, to make network namespaces" if os.geteuid() else ""


class Slurm:
    """The running cluster: commands to it, and accidents."""

    def __init__(self, folder: Path, kill_wait: int):
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen] = {}
        for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        hosts = {"localhost": "127.0.0.1"} | _ADDRESSES
        (folder / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in hosts.items())
        )
        self.conf.write_text(_CONF.format(folder=folder, kill_wait=kill_wait))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        for number in (0, 1):
            # as /dev/null
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))

    @property
    def env(self) -> dict[str, str]:
        """The variables for commands to the cluster, and for its jobs."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"SLURM_CONF": str(self.conf), "PATH": path}
        unset = ("ACCELERATE_", "OMP_")
        return {k: v for k, v in os.environ.items() if not k.startswith(unset)} | own

    def start(self) -> None:
        """Start the network and the daemons, and wait until both nodes are there."""
        run_command(f"ip link add {_BRIDGE} type bridge")
        run_command(f"ip address add {_OWN_ADDRESS} dev {_BRIDGE}")
        run_command(f"ip link set {_BRIDGE} up")
        self._start_munge()
        for node in _ADDRESSES:
            self._make_network(node)
            self.power_on(node)
            # a node that finds no controller tries again only after ten seconds
            until(self.states)
        until(lambda: self.states() == ["idle", "idle"])

    def stop(self) -> None:
        """End the nodes with all that runs on them, and take the network away."""
        for name in list(self._daemons):
            self.power_off(name)
        _remove_network()

    def __call__(self, *command: str, check: bool = True, **env: str) -> str:
        """The output of a SLURM command such as `scontrol`; an error has all it wrote."""
        result = subprocess.run(
            command, capture_output=True, text=True, env=self.env | env, cwd=ROOT, timeout=PATIENCE
        )
        assert result.returncode == 0 or not check, (
            f"{' '.join(command)}: {result.stdout}{result.stderr}"
        )
        return result.stdout

    def states(self) -> list[str]:
        """The states of the nodes, such as `idle` and `down*`."""
        return self("sinfo", "-h", "-N", "-p", "low", "-o", "%T", check=False).split()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it: JobState, Restarts, ExitCode and so on."""
        text = self("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def processes(self, pattern: str) -> list[int]:
        """What runs on the nodes with the pattern in its command."""
        found = []
        for node in NODES:
            pids = run_command(f"ip netns pids {node}", check=False).split()
            for pid in pids:
                with suppress(OSError):  # it may have ended
                    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    found += [int(pid)] if re.search(pattern, command) else []
        return found

    def cut(self, node: str) -> None:
        """Pull the network cable of a node."""
        run_command(f"ip link set {node}-port down")

    def heal(self, node: str) -> None:
        run_command(f"ip link set {node}-port up")

    def slow_down(self, node: str) -> None:
        """Let 20 Mbit/s through to a node."""
        limit = "rate 20mbit burst 32kb latency 400ms"
        run_command(f"tc qdisc add dev {node}-port root tbf {limit}")

    def speed_up(self, node: str) -> None:
        run_command(f"tc qdisc delete dev {node}-port root")

    def power_off(self, node: str) -> None:
        """End everything that runs on a node at once."""
        process = self._daemons.pop(node)
        # unshare, whose --kill-child takes process 1 of the node with it, and that all the others
        process.kill()
        process.wait()

    def power_on(self, node: str) -> None:
        """Start a node; it takes a few seconds until SLURM knows."""
        daemon = f"slurmd -N {node}" if node in NODES else "slurmctld"
        shell = _NODE.format(name=node, folder=self.folder, daemon=daemon)
        inside = "unshare --uts --mount --pid --fork --kill-child --mount-proc sh -c"
        self._spawn(node, "nsenter", f"--net=/run/netns/{node}", *inside.split(), shell)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        folder.chmod(0o755)
        files = {name: f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")}
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        user = ["--reuid=munge", "--regid=munge", "--clear-groups"]
        self._spawn(
            "munged", *user, "munged", "--foreground", f"--socket={folder}/socket", *files.values()
        )
        until((folder / "socket").exists)

    def _make_network(self, node: str) -> None:
        run_command(f"ip netns add {node}")
        run_command(f"ip link add {node}-port type veth peer name eth0 netns {node}")
        run_command(f"ip link set {node}-port master {_BRIDGE} up")
        run_command(f"ip -n {node} address add {_ADDRESSES[node]}/24 dev eth0")
        run_command(f"ip -n {node} link set eth0 up")
        run_command(f"ip -n {node} link set lo up")

    def _spawn(self, name: str, *command: str) -> None:
        # In a session of its own, as a daemon: Ctrl-C is not for it. It ends with the tests,
        # however those end.
        with (self.folder / f"{name}.out").open("a") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
            )


@contextmanager
def slurm_cluster(kill_wait: int = 30) -> Iterator[Slurm]:
    """A cluster that is there while the context lasts, with its state in a new folder."""
    folder = Path(tempfile.mkdtemp(prefix="slm"))
    folder.chmod(0o755)
    _remove_network()  # of a test run that was killed
    cluster = Slurm(folder, kill_wait)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_network() -> None:
    for node in _ADDRESSES:
        run_command(f"ip netns delete {node}", check=False)
    run_command(f"ip link delete {_BRIDGE}", check=False)


if __name__ == "__main__":
    with slurm_cluster() as slurm:
        input(
            f"export SLURM_CONF={slurm.env['SLURM_CONF']}    # then sinfo, sbatch; Enter ends it\n"
        )
        sys.exit()
