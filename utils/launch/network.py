"""Network interfaces, addresses and ports of this machine."""

import os
import socket

import psutil

from utils.errors import UserError
from utils.launch.environment import is_launched


def set_interface(seen: list[str], wanted: str | None, several_machines: bool) -> str:
    """Set the network interface that gloo and NCCL use, and return its name.

    It is --interface, or GLOO_SOCKET_IFNAME, or the interface over which this machine reaches that
    of rank 0. `seen` has the IP address of rank 0's machine, as found by each rank. On that machine
    itself it may be a loopback address, as Debian sets in /etc/hosts, so the address found by
    another machine is used.
    """
    names = ", ".join(sorted(psutil.net_if_addrs()))
    host = socket.gethostname()
    name = wanted or os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None:
        outside = next((address for address in seen if address and not _is_loopback(address)), None)
        towards = outside if several_machines else None
        name = interface_of(_address_towards(towards or "127.0.0.1"))
        # Without another address, all processes are on this machine. Several launchers may be, too.
        if several_machines and outside is None and not is_launched():
            raise UserError(
                f"all processes are on {host}, but LOCAL_WORLD_SIZE implies several machines",
                "export LOCAL_WORLD_SIZE=WORLD_SIZE, and LOCAL_RANK=RANK for each process",
            )
        if name is None:
            raise UserError(
                f"{host} has no network interface that reaches {outside}",
                f"set --interface to the one between the machines, one of {names}",
            )
    # gloo accepts several names
    elif any(_is_loopback(address_of(each)) for each in name.split(",")) and several_machines:
        problem = f"interface {name} is only for {host} itself, but the run has several machines"
        raise UserError(problem, f"set --interface to another one of {names}")
    os.environ["GLOO_SOCKET_IFNAME"] = name
    if wanted:
        # without "=", it would also match longer names
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"
    elif several_machines:  # on one machine NCCL finds the best transport itself
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return name


def interface_of(address: str) -> str | None:
    """The name of the network interface of this machine that has the IP address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%")[0] == address for known in addresses):
            return name
    return "lo" if _is_loopback(address) and "lo" in psutil.net_if_addrs() else None


def address_of(interface: str) -> str:
    """An IP address of the interface, IPv4 if possible."""
    known = psutil.net_if_addrs()
    addresses = known.get(interface.split(",")[0], [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in addresses:
            if found.family == family:
                return found.address
    problem = f"--interface (or GLOO_SOCKET_IFNAME) {interface}: has no IP address on"
    fix = f"set --interface to one of {', '.join(sorted(known))}"
    raise UserError(f"{problem} {socket.gethostname()}", fix)


def is_own_address(address: str) -> bool:
    """Whether the IP address belongs to this machine."""
    return _is_loopback(address) or interface_of(address) is not None


def _address_towards(address: str) -> str:
    """This machine's address on the route to another address. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def resolve(name: str) -> str:
    """The IP address of a host name."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"{name}: {socket.gethostname()} cannot find its address ({reason})"
        fix = "use the IP address of rank 0's machine as MASTER_ADDR"
        raise UserError(problem, f"{fix}, or enter the name in /etc/hosts") from error


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
