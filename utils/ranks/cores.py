"""Processor cores that other programs use while a script starts."""

import json
import socket
from collections import defaultdict

from utils.memory import usable_cores, used_cores
from utils.ranks.ranks import Ranks

_LEAST, _SHARE = 0.5, 0.25  # other programs are reported if they use this many cores and this fraction of all


def taken_cores(ranks: Ranks) -> list[str]:
    """A line for each machine where other programs use the cores of this run, measured since its start; collective."""
    mine = socket.gethostname(), ranks.threads, sorted(usable_cores()), *used_cores()
    hosts = defaultdict(list)
    for text in ranks.gather_text(json.dumps(mine)):
        host, *numbers = json.loads(text)
        hosts[host].append(numbers)
    return [line for host, members in hosts.items() if (line := _line(host if len(hosts) > 1 else "", members))]


def _line(host: str, members: list[list]) -> str:
    """The line for a machine; empty if its cores are free.

    `members` has for each rank: its threads, its cores, how many cores all programs use, and how many the rank uses.
    """
    cores = len({core for _, own, _, _ in members for core in own})
    everyone = sum({tuple(own): used for _, own, used, _ in members}.values())  # ranks may share their cores
    taken = min(cores, everyone - sum(used for *_, used in members))
    if taken < max(_LEAST, _SHARE * cores):
        return ""
    threads = max(1, int((cores - taken) / len(members)))
    fixes = f"stop them, use --threads {threads}, or" if threads < members[0][0] else "stop them or"
    problem = f"other programs use {taken:.1f} of the {cores} processor cores, which slows this run down"
    return f"{host}{': ' * bool(host)}{problem}; {fixes} use another machine"
