"""How the processes of a run find each other: a store that all of them reach, and who is there.

The store may hold what earlier attempts left: the launcher's lives through restarts, a file through launches. So rank 0
opens a session with a new name, every other rank answers to that name, and rank 0 closes the list of those present.
Whoever answers is alive, whatever else the store says, and a rank that does not is named.
"""

import errno
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

import torch.distributed as dist

from utils.errors import one_line
from utils.launch.environment import Topology, restarts
from utils.launch.network import address_of, free_port, is_own, outward_address, resolve, user_of
from utils.waiting import call_with_timeout

_POLL = 0.02, 0.25  # seconds between two looks into the store, at first and at last


@dataclass
class Member:
    """What a rank tells the others about itself when they meet."""

    rank: int
    world_size: int
    host: str
    process: int
    nonce: str
    master: str = ""  # the IP address that the master's name means on this machine
    gpu: str = ""  # the identity of its GPU, if it has one
    endpoint: str = ""  # of rank 0, when the processes met in a file: the address and port of the store to go on with


def meet(
    topology: Topology, init_method: str, timeout: float, interface: str | None, gpu: str = ""
) -> tuple[dist.Store, list[Member]]:
    """Find the other processes; returns (the store of this session, who is there).

    Raises ValueError, with what to do, when they do not come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    kind = urlparse(init_method)
    me = Member(topology.rank, topology.world_size, socket.gethostname(), os.getpid(), uuid.uuid4().hex, gpu=gpu)
    if kind.scheme == "file":
        return _meet_in_file(Path(kind.path), topology, me, deadline, interface)
    address, port = (kind.hostname, kind.port) if kind.scheme == "tcp" else (topology.address, topology.port)
    me.master = resolve(address)
    store = _tcp_store(topology, address, port, deadline)
    session, members = _session(store, me, deadline, f"{address}:{port}")
    return dist.PrefixStore(session, store), members


def check_init_method(init_method: str) -> None:
    """Raise ValueError for anything but env://, tcp://HOST:PORT and file:///PATH."""
    with suppress(ValueError):  # a port that is no number
        kind = urlparse(init_method)
        if init_method == "env://" or (kind.scheme == "tcp" and kind.hostname and kind.port):
            return
        if kind.scheme == "file" and not kind.netloc and kind.path.strip("/"):
            return
    raise ValueError(f"--init_method {init_method}: must be env://, tcp://HOST:PORT or file:///PATH")


def _session(store: dist.Store, me: Member, deadline: float, where: str) -> tuple[str, list[Member]]:
    """Open a session or join the open one; returns its name and its members in the order of the ranks."""
    if me.rank == 0:
        session = uuid.uuid4().hex
        store.set("session", session)
        others = [f"{session}/{rank}" for rank in range(1, me.world_size)]
        if not _wait(lambda: not others or store.check(others), deadline):
            missing = [key.split("/")[1] for key in others if not store.check([key])]
            raise ValueError(
                f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not come to {where} in time, "
                f"{me.world_size - len(missing)} of {me.world_size} did; see whether they were started, can reach "
                "that address, and were given the same one"
            )
        answers = [json.dumps(asdict(me)), *(store.get(key).decode() for key in others)]
        store.set(f"{session}/all", json.dumps(answers))
        return session, _members(answers)

    joined: list[str] = []

    def join() -> bool:
        if not store.check(["session"]):
            return False
        session = store.get("session").decode()
        if session not in joined:
            if restarts() and store.check([f"{session}/all"]):  # the others may still wait for the attempt before
                store.set(f"{session}/ended", f"rank {me.rank} was killed, and started again by its launcher")
            store.set(f"{session}/{me.rank}", json.dumps(asdict(me)))
            joined.append(session)
        # The list of an earlier attempt holds that attempt's nonces.
        return store.check([f"{session}/all"]) and me.nonce in store.get(f"{session}/all").decode()

    if not _wait(join, deadline):
        raise ValueError(
            f"rank 0 did not open a session at {where} in time, or not all ranks came to it; see its own message, and "
            f"whether two processes are rank {me.rank}"
        )
    return joined[-1], _members(json.loads(store.get(f"{joined[-1]}/all")))


def _members(answers: list[str]) -> list[Member]:
    members = [Member(**json.loads(answer)) for answer in answers]
    for member in members:
        if member.world_size != len(members):
            if members[0].process == os.getpid():
                time.sleep(1)  # rank 0 may serve the store in which the others are to read the same
            raise ValueError(
                f"rank 0 was started for {len(members)} processes, rank {member.rank} for {member.world_size}; give "
                "all the same WORLD_SIZE (--num_processes)"
            )
    return members


def check_own_gpus(members: list[Member]) -> None:
    """Raise ValueError when two ranks have the same GPU, which NCCL refuses at length."""
    first: dict[tuple[str, str], int] = {}
    for member in members:
        other = first.setdefault((member.host, member.gpu), member.rank)
        if member.gpu and other != member.rank:
            raise ValueError(
                f"ranks {other} and {member.rank} have the same GPU of {member.host}; give each task its own "
                "(srun --gpus-per-task 1), or show all GPUs to all"
            )


def _wait(condition: Callable[[], bool], deadline: float) -> bool:
    pause, most = _POLL
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(most, pause * 1.2)
    return True


def _tcp_store(topology: Topology, address: str, port: int, deadline: float) -> dist.TCPStore:
    """The store at an address, which rank 0 serves unless its launcher does."""
    serves = topology.is_main and not launcher_serves(address, port)
    if serves and not leads_here(address, port):
        raise ValueError(
            f"{address} does not lead to {socket.gethostname()}, where rank 0 was started; MASTER_ADDR or "
            "--init_method must name the machine of rank 0"
        )
    if not serves:
        return _reach(address, port, deadline)
    try:
        return dist.TCPStore(address, port, topology.world_size, True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise ValueError(
                f"port {port} of {socket.gethostname()} cannot be used ({one_line(error)[:160]})"
            ) from error
        raise ValueError(
            f"port {port} is taken on {socket.gethostname()}{user_of(port)}; choose another MASTER_PORT "
            "(--main_process_port, --master_port), or end what holds it"
        ) from error


def leads_here(address: str, port: int) -> bool:
    """Whether this machine has the address, or reaches itself by it all the same, as through a cloud's translation."""
    if is_own(resolve(address)):
        return True
    try:
        with socket.create_server(("", port)):
            return _listens(address, port)
    except OSError as error:  # of a port that is taken nobody can tell
        return error.errno == errno.EADDRINUSE


def _reach(address: str, port: int, deadline: float) -> dist.TCPStore:
    """The store that another process serves."""
    waits = max(1.0, deadline - time.monotonic())
    if not _wait(lambda: _listens(address, port), deadline):
        raise ValueError(
            f"nobody answered at {address}:{port} within {waits:.0f} s; see whether rank 0 runs, on that machine, and "
            "no firewall is between"
        )
    try:  # within a time of our own: it would wait for ever for the first word of a server of another kind
        return call_with_timeout(
            lambda: dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=waits)),
            max(3.0, deadline - time.monotonic()),
        )
    except RuntimeError as error:
        raise ValueError(
            f"what listens at {address}:{port} is not rank 0 of this run ({one_line(error)[:100]}); choose another "
            "MASTER_PORT (--main_process_port, --master_port)"
        ) from error


def _listens(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=3):
        return True
    return False


def launchers_store(timeout: float) -> dist.Store | None:
    """The store that torchrun or accelerate keeps through restarts; None where it keeps none."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return _reach(address, int(port), time.monotonic() + timeout) if launcher_serves(address, port) else None


def launcher_serves(address: str, port: int | str) -> bool:
    """Whether the launcher serves a store there: it does so at MASTER_ADDR and MASTER_PORT, if at all."""
    there = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and there == (address, str(port))


def _check_meeting_file(path: Path) -> None:
    """Raise ValueError for a file that PyTorch's store has not begun: it would read that for ever."""
    with path.open("rb") as file:
        begun = file.read(4)  # the length of a key
    if begun and not 0 < int.from_bytes(begun, sys.byteorder) < 2**12:
        raise ValueError(f"--init_method file://{path}: is a file of something else; delete it, or name another")


def _meet_in_file(path: Path, topology: Topology, me: Member, deadline: float, interface: str | None):
    """Meet in a file on a shared disk, and go on over a store that rank 0 serves; the file is then deleted."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--init_method file://{path}: must name a file in a folder that is there on all machines")
    with suppress(FileNotFoundError):
        _check_meeting_file(path)
    if topology.is_main:
        one_machine = topology.local_world_size == topology.world_size
        address = "127.0.0.1" if one_machine else address_of(interface) if interface else outward_address()
        port = free_port()
        served = dist.TCPStore(address, port, topology.world_size, True, wait_for_workers=False, multi_tenant=True)
        me.endpoint, me.master = f"{address}:{port}", address
    try:
        session, members = _session(dist.FileStore(str(path), -1), me, deadline, str(path))
    except RuntimeError as error:
        raise ValueError(f"--init_method file://{path}: {one_line(error)[:160]}; delete it, or name another") from error
    if not topology.is_main:
        address, _, port = members[0].endpoint.rpartition(":")
        served = _tcp_store(topology, address, int(port), deadline)
    served.add(f"{session}-arrived", 1)
    if topology.is_main:
        _wait(lambda: served.add(f"{session}-arrived", 0) == topology.world_size, deadline)
        path.unlink(missing_ok=True)
    return dist.PrefixStore(session, served), members
