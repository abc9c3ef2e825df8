"""Check whether a topology is healthy: the machines, the connections between them, and a training
step across them.

    python doctor.py                                                        this machine
    accelerate launch --config_file accelerate_configs/2gpu.yaml doctor.py  the launch of train.py
    srun --ntasks 16 --gpus-per-task 1 python doctor.py --output_dir /shared/runs --json doctor.json

Launch it exactly like train.py. The exit code is 0 if all checks are green, and 1 if any is red.
Each red line is followed by its fix. `python doctor.py --help` lists the settings.
"""

from utils.entry import guard_output  # the first import, see there

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from extras.doctor import processes
from extras.doctor.findings import Finding, any_red, as_json, merge, show
from extras.doctor.machine import check_machine
from utils.config import parse_args
from utils.errors import AgreedError, is_lost_rank, one_line
from utils.files import expand, write_file
from utils.launch import (
    Topology,
    delay_exit,
    exit_with_error,
    inform_launcher,
    is_launched,
    reports_for_machine,
)
from utils.output import exit_with
from utils.ranks import Ranks, distributed_session
from utils.replacing import RESULT, check_output
from utils.settings.scripts import DoctorConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Check this machine, then all processes together, and print the findings.

    Exits with code 1 if any is red.
    """
    guard_output()
    config = parse_args(DoctorConfig, "doctor.py", argv)
    findings, topology = check_machine(config)
    if topology is None or findings[0].red:
        report_alone(findings, topology, config)
        raise SystemExit(1)
    # if another rank exits, the launcher ends this one: print first
    if topology.is_main and is_launched():
        signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(3))

    with distributed_session("doctor.py", config) as ranks:
        try:
            ranks.join()
        except (ValueError, RuntimeError, OSError) as error:
            report_alone([*findings, Finding.of("connection", error)], topology, config)
            exit_with(1)
        findings, broken = check_run(ranks, config, findings)
        if ranks.is_main:
            machines = len({member.host for member in ranks.members}) or 1
            size = topology.world_size
            count = "1 process" if size == 1 else f"{size} processes"
            place = "1 machine" if machines == 1 else f"{machines} machines"
            report(f"{count} on {place}", findings, config)
        if broken:  # other ranks may have exited: do not wait for them
            raise SystemExit(1)
    if any_red(findings):
        raise SystemExit(1)


def check_run(
    ranks: Ranks, config: DoctorConfig, findings: list[Finding]
) -> tuple[list[Finding], bool]:
    """Merge the findings of all ranks, then run the checks that need the process group; collective.

    All ranks call every check, whatever the earlier checks found. If a check fails because a rank
    has exited, the earlier findings are kept. Returns (the findings, whether a check failed in this
    way).
    """
    place = "machines"
    try:
        findings = merge(ranks, findings)
        facts = processes.facts_of_all(ranks)
        checks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
            ("machines", lambda: processes.machines(facts)),
            ("versions", lambda: processes.versions(facts)),
            ("folder", lambda: processes.folder(ranks, config)),
            ("all-reduce", lambda: processes.bandwidth(ranks, config, facts)),
            ("gradients", lambda: processes.gradients(ranks)),
        ]
        for place, check in checks:  # a fault found by one check can cause faults in later checks
            ranks.enter_collective(f"checking {place}")
            try:
                found = check()
            except AgreedError as error:  # raised on all ranks, which can continue
                found = Finding.of(place, error)
            findings += found if isinstance(found, list) else [found]
    except Exception as error:
        text = one_line(ranks.record_end(error))
        # the main process only sees that this rank exits
        if not ranks.is_main and not is_lost_rank(error):
            sys.stderr.write(f"doctor.py: rank {ranks.topology.rank}, checking {place}: {text}\n")
        return [
            *findings,
            Finding(place, text, False, "the checks after this one did not run"),
        ], True
    return findings, False


def report_alone(
    findings: Sequence[Finding], topology: Topology | None, config: DoctorConfig
) -> None:
    """Print the findings if the processes did not connect: the first rank of each machine prints
    its table.
    """
    if topology is None:
        rank = os.environ.get("RANK", "0")
        is_reporter = reports_for_machine() or not is_launched()
    else:
        rank = str(topology.rank)
        is_reporter = topology.local_rank == 0
    if is_reporter:
        if topology and not topology.is_main:
            config.json = None  # the disk may be shared
        place = f"{socket.gethostname()}, rank {rank}; the processes are not connected"
        report(place, findings, config)
    else:
        delay_exit()


def report(title: str, findings: Sequence[Finding], config: DoctorConfig) -> None:
    """Print the table and a summary, then write the findings to --json, if it is set."""
    wrong = sum(f.red for f in findings)
    judged = sum(f.ok is not None for f in findings)
    summary = (
        f"{wrong} of {judged} checks are red"
        if wrong
        else f"healthy: all {judged} checks are green"
    )
    print(f"{show(f'Lockstep doctor  {title}', findings)}\n{summary}", flush=True)
    if wrong:
        faults = [f"{f.name}: {f.value}; {f.fix}" for f in findings if f.red]
        inform_launcher("\n".join([*faults, summary]))
    if config.json:
        try:
            check_output(config, "json", RESULT)
            write_file(expand(config.json), as_json(findings))
        except (ValueError, OSError) as error:
            exit_with_error(error, "doctor.py")


if __name__ == "__main__":
    main()
