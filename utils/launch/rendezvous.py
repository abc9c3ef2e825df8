"""How the processes of a run find each other: a store that all of them can reach, and a list of
members.

The store can contain keys of earlier attempts, because a launcher's store survives restarts. So
rank 0 opens a session with a new name, every other rank joins that session, and rank 0 publishes
the list of members. A rank that joins is alive, whatever else is in the store. An error names the
ranks that do not join.
"""

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from urllib.parse import urlparse

from torch.distributed import PrefixStore, Store, TCPStore

from utils.errors import UserError, one_line
from utils.launch.devices import check_shared_gpus
from utils.launch.environment import Topology, restart_count
from utils.launch.network import is_own_address, resolve
from utils.waiting import call_with_timeout

_POLL = 0.05  # seconds between two reads of the store
_OTHER_PORT = "choose another MASTER_PORT (--main_process_port, --master_port)"


@dataclass
class Member:
    """What a rank publishes about itself when it joins."""

    rank: int
    world_size: int
    host: str
    process: int
    nonce: str
    master: str  # the IP address of MASTER_ADDR on this machine
    gpu: str = ""  # its UUID


def rendezvous(
    topology: Topology, init_method: str, timeout: float, gpu: str = "", backend: str = "gloo"
) -> tuple[Store, list[Member]]:
    """Find the other processes; returns (the store of this session, its members in the order of the
    ranks).

    Raises UserError if they do not join within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    place = urlparse(init_method)
    address = topology.address
    port = topology.port
    if place.scheme == "tcp":
        address = place.hostname or ""
        port = place.port or 0
    host = socket.gethostname()
    nonce = uuid.uuid4().hex
    master = resolve(address)
    me = Member(topology.rank, topology.world_size, host, os.getpid(), nonce, master, gpu)
    store = _tcp_store(topology, address, port, deadline)
    begin = _open if me.rank == 0 else _join
    session, answers = begin(store, me, deadline, f"{address}:{port}")
    members = [Member(**answer) for answer in answers]
    try:
        for member in members:
            if member.world_size != len(members):
                problem = f"rank 0 was started with {len(members)} processes"
                raise UserError(
                    f"{problem}, rank {member.rank} with {member.world_size}",
                    "start all with the same WORLD_SIZE (--num_processes)",
                )
        check_shared_gpus([(member.host, member.gpu) for member in members], backend)
    except UserError:
        if me.rank == 0:
            time.sleep(1)  # the others read the same list from the store, which rank 0 may serve
        raise
    return PrefixStore(session, store), members


def _open(store: Store, me: Member, deadline: float, where: str) -> tuple[str, list[dict]]:
    """Open a session as rank 0; returns its name and its members in the order of the ranks."""
    session = uuid.uuid4().hex
    store.set("session", session)
    others = [f"{session}/{rank}" for rank in range(1, me.world_size)]
    if not _wait(lambda: not others or store.check(others), deadline):
        missing = [key.split("/")[1] for key in others if not store.check([key])]
        who = "ranks" if len(missing) > 1 else "rank"
        problem = f"{who} {', '.join(missing)} did not connect to {where} in time"
        found = me.world_size - len(missing)
        fix = "check that all were started with that address and can reach it"
        raise UserError(f"{problem}, {found} of {me.world_size} did", fix)
    answers = [asdict(me), *(json.loads(store.get(key)) for key in others)]
    store.set(f"{session}/all", json.dumps(answers))
    return session, answers


def _join(store: Store, me: Member, deadline: float, where: str) -> tuple[str, list[dict]]:
    """The same for the other ranks, which join the session that rank 0 has opened."""
    joined = ""
    while time.monotonic() < deadline:
        session = store.get("session").decode() if store.check(["session"]) else ""
        if session != joined:
            # ranks of the earlier attempt may still be waiting
            if restart_count() and store.check([f"{session}/all"]):
                store.set(
                    f"{session}/ended", f"rank {me.rank} was killed, and its launcher restarted it"
                )
            store.set(f"{session}/{me.rank}", json.dumps(asdict(me)))
            joined = session
        answers = ""
        if session and store.check([f"{session}/all"]):
            answers = store.get(f"{session}/all").decode()
        if me.nonce in answers:  # the list of an earlier attempt has the nonces of that attempt
            return session, json.loads(answers)
        time.sleep(_POLL)
    raise UserError(
        f"rank 0 did not start the rendezvous at {where} in time, or not all ranks joined it",
        f"read the output of rank 0, and check that only one process is rank {me.rank}",
    )


def _wait(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait until the condition is true; False if it is not before the deadline.

    Not with `wait` of the store: c10d prints warnings about a wait that ends at its time limit.
    """
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _tcp_store(topology: Topology, address: str, port: int, deadline: float) -> TCPStore:
    """The store at an address. Rank 0 serves it, unless its launcher does."""
    if not topology.is_main or launcher_serves(address, port):
        return _reach(address, port, deadline)
    host = socket.gethostname()
    if not leads_to_this_machine(address, port):
        fix = "MASTER_ADDR or --init_method must name the machine of rank 0"
        raise UserError(f"{address} does not lead to {host}, where rank 0 was started", fix)
    try:
        size = topology.world_size
        return TCPStore(address, port, size, True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise UserError(
                f"port {port} of {host} cannot be used ({one_line(error)[:160]})", _OTHER_PORT
            ) from error
        fix = f"{_OTHER_PORT}, or stop the process that uses it"
        own = "if that is a process of this run, two have RANK=0"
        raise UserError(f"port {port} is taken on {host}", f"{fix}; {own}") from error


def leads_to_this_machine(address: str, port: int) -> bool:
    """Whether the address leads to this machine, directly or through the address translation of a
    cloud.
    """
    if is_own_address(resolve(address)):
        return True
    try:
        with socket.create_server(("", port)):
            return _listens(address, port)
    except OSError as error:  # if the port is taken, assume that the address is right
        return error.errno == errno.EADDRINUSE


def _reach(address: str, port: int, deadline: float) -> TCPStore:
    """The store that another process serves."""
    seconds = max(1.0, deadline - time.monotonic())
    if not _wait(lambda: _listens(address, port), deadline):
        raise UserError(
            f"no answer from {address}:{port} within {seconds:.0f} s",
            "check that rank 0 runs on that machine, and that no firewall is between the machines",
        )
    # with a separate timeout: TCPStore waits forever for an answer from a different kind of server
    try:
        return call_with_timeout(
            lambda: TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds)),
            max(3.0, deadline - time.monotonic()),
        )
    except RuntimeError as error:
        problem = f"the process that listens at {address}:{port} is not rank 0 of this run"
        raise UserError(f"{problem} ({one_line(error)[:100]})", _OTHER_PORT) from error


def _listens(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=3):
        return True
    return False


def launcher_store(timeout: float) -> Store | None:
    """The store of torchrun or accelerate, which survives restarts; None if it has none."""
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not launcher_serves(address, port):
        return None
    return _reach(address, int(port), time.monotonic() + timeout)


def launcher_serves(address: str, port: int | str) -> bool:
    """Whether the launcher serves a store at this address and port."""
    own = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and own == (address, str(port))
