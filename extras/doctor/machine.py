"""Checks of one machine, before the processes connect."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from extras.doctor.findings import Finding
from utils.files import check_output_folder, expand
from utils.launch import Topology, is_launched, read_topology
from utils.memory import free_memory
from utils.ranks import Ranks, check_sharding
from utils.settings.ranks import RankSettings
from utils.settings.scripts import DoctorConfig

GB = 1e9
_SCRIPTS = {"train.py", "eval.py", "predict.py", "replay.py", "export.py"}


def check_machine(config: DoctorConfig) -> tuple[list[Finding], Topology | None]:
    """Check this machine; returns (findings, of which the launch is the first, and the topology if
    it is valid).

    Resources that the ranks of a machine share are checked by its first rank only.
    """
    launch, topology = check_launch(config)
    processes = topology.local_world_size if topology else 1
    findings = [launch]
    if topology is None or topology.local_rank == 0:
        findings += check_leftovers(), check_memory(processes), check_disk(config)
    return findings, topology


def check_launch(config: DoctorConfig) -> tuple[Finding, Topology | None]:
    """Check that the launcher's environment variables are consistent, and that this machine has the
    devices.
    """
    before = dict(os.environ)
    topology = None
    try:
        topology = read_topology(init_method=config.init_method)
        # these raise the errors that train.py would raise for this launch
        ranks = Ranks(topology, config, "doctor.py")
        check_sharding(RankSettings(), ranks, optimizer="", fixed_order=False)
    except ValueError as error:
        return Finding.of("launch", error), topology
    finally:  # the topology is read again later, from the launcher's variables
        os.environ.clear()
        os.environ.update(before)
    if topology.source == "nobody":
        return Finding("launch", "one process, no launcher", True), topology
    several = "es" if topology.world_size > 1 else ""
    value = f"{topology.world_size} process{several}, {topology.local_world_size} on this machine"
    value = f"{value}, according to {topology.source}"
    return Finding("launch", value, True), topology


def check_leftovers() -> Finding:
    """Find processes of Lockstep whose launcher has exited, of this user, or of all for root.

    Stops none of them.
    """
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            scripts = _scripts_of(process)
            parent = process.parent()
            waited_for = scripts & (_scripts_of(parent) if parent else set())
            if scripts and not waited_for and is_launched(process.environ()):
                found[process.pid] = (
                    f"process {process.pid} ({scripts.pop()}): its launcher has exited"
                )
    if not found:
        return Finding("leftovers", "no process of an earlier run", True)
    numbers = " ".join(map(str, found))
    problem = "they slow this run down or use its memory"
    fix = f"{problem}; unless they should continue, kill {numbers}"
    return Finding("leftovers", "\n".join(found.values()), False, fix, {"processes": list(found)})


def _scripts_of(process: psutil.Process) -> set[str]:
    return {Path(word).name for word in process.cmdline()} & _SCRIPTS


def check_memory(processes: int) -> Finding:
    """Check that there is at least 1 GB of free memory for each process on this machine."""
    free, total = free_memory()
    problem = "the system kills a rank when memory runs out"
    fix = f"{problem}; stop other programs, or start fewer processes"
    return Finding(
        "memory", f"{free / GB:.1f} of {total / GB:.1f} GB free", free >= GB * processes, fix
    )


def check_disk(config: DoctorConfig) -> Finding:
    """Check that run folders can be created, and have space for checkpoints."""
    folder = expand(config.output_dir)
    try:
        free = shutil.disk_usage(check_output_folder("--output_dir", folder)).free
    except ValueError as error:
        return Finding.of("disk", error)
    fix = (
        "a run ends if a checkpoint cannot be written; delete old runs, or set another --output_dir"
    )
    return Finding("disk", f"{free / GB:.1f} GB free for {folder}", free >= GB, fix)
