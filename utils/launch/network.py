"""Network interfaces, addresses and ports of this machine. Needs no torch."""

import os
import socket
from contextlib import suppress

import psutil


def set_interface(seen: list[str], wanted: str | None, several_machines: bool) -> str:
    """Tell gloo and NCCL which network interface to use, and return its name.

    It is --interface, or GLOO_SOCKET_IFNAME, or the one over which this machine reaches rank 0's: `seen` are the IP
    addresses that each rank knows that machine by. It may know itself only by a loopback address (Debian writes its
    name so into /etc/hosts), so the others' word counts.
    """
    names = sorted(psutil.net_if_addrs())
    name = wanted or os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None:
        outside = next((address for address in seen if address and not _is_loopback(address)), None)
        name = interface_of(_address_towards((outside or "127.0.0.1") if several_machines else "127.0.0.1"))
        if several_machines and outside is None:  # nobody could have come to such an address from elsewhere
            raise ValueError(
                f"all processes are on {socket.gethostname()}, but LOCAL_WORLD_SIZE says that there are several "
                "machines; export LOCAL_WORLD_SIZE=WORLD_SIZE, and LOCAL_RANK=RANK for each"
            )
        if name is None or (several_machines and is_loopback(name)):
            raise ValueError(
                f"{socket.gethostname()} has no network interface towards {outside}; name the one between the "
                f"machines with --interface, one of {', '.join(names)}"
            )
    elif not set(name.split(",")) <= set(names):  # gloo takes several
        flag = "--interface" if wanted else "GLOO_SOCKET_IFNAME"
        raise ValueError(f"{flag} {name}: {socket.gethostname()} has {', '.join(names)}")
    elif several_machines and any(map(is_loopback, name.split(","))):
        raise ValueError(f"interface {name} does not leave {socket.gethostname()}; the run has several machines")
    os.environ["GLOO_SOCKET_IFNAME"] = name
    if wanted:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # that one, not all whose names begin so
    elif several_machines:  # on one machine NCCL does better by itself
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return name


def interface_of(address: str) -> str | None:
    """The name of the network interface of this machine that has the IP address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%")[0] == address for known in addresses):
            return name
    return "lo" if _is_loopback(address) and "lo" in psutil.net_if_addrs() else None


def address_of(interface: str) -> str:
    """An IP address of the interface, of version 4 if it has one."""
    addresses = psutil.net_if_addrs().get(interface.split(",")[0], [])
    found = [a.address for family in (socket.AF_INET, socket.AF_INET6) for a in addresses if a.family == family]
    if not found:
        raise ValueError(f"--interface {interface}: has no IP address on {socket.gethostname()}")
    return found[0]


def is_loopback(interface: str) -> bool:
    return _is_loopback(address_of(interface))


def is_own(address: str) -> bool:
    """Whether the IP address is one of this machine."""
    return _is_loopback(address) or interface_of(address) is not None


def outward_address() -> str:
    """The IP address by which this machine is known outside: of its default route, or its only one."""
    with suppress(OSError):
        return _address_towards("192.0.2.1")  # of no machine (RFC 5737), and nothing is sent
    known = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET}
    others = {address for address in known if not _is_loopback(address)}
    if len(others) != 1:
        raise ValueError(f"{socket.gethostname()} has {len(others)} networks and no default route; give --interface")
    return others.pop()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _address_towards(address: str) -> str:
    """The address of this machine from which a packet to the other would leave; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def resolve(name: str) -> str:
    try:
        return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{name}: {socket.gethostname()} cannot find its address ({reason(error)}); use the IP address of rank "
            "0's machine as MASTER_ADDR, or enter the name in /etc/hosts"
        ) from error


def reason(error: Exception) -> str:
    """Why a name was not resolved or an address not taken, in the system's words."""
    return getattr(error, "strerror", None) or str(error)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def user_of(port: int) -> str:
    """Who listens on the port of this machine, as words to append; empty when that is not to be seen."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:  # of another user
                    return ""
                process = psutil.Process(connection.pid)
                return f" by process {process.pid} ({' '.join(process.cmdline()[:3])[:80]})"
    return ""
