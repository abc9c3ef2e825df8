"""Say whether a topology is healthy: the machines, what is between them, and a step of training across them.

    python doctor.py                                                             this machine
    accelerate launch --config_file accelerate_configs/2gpu.yaml doctor.py       the launch that train.py would have
    srun --ntasks 16 --gpus-per-task 1 python doctor.py --output_dir /shared/runs --json doctor.json

Launched exactly like train.py. The exit code is 0 when all is well and 1 when something is red; a red line says what to
do. `python doctor.py --help` lists the settings.
"""

from utils.output import guard_output  # the first import: see its docstring

# isort: split
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from accelerate import Accelerator

from utils.checks import exchange as exchange_checks
from utils.checks import processes as health
from utils.checks.findings import Finding, as_json, merged, red, show
from utils.checks.machine import check_machine
from utils.config.cli import parse_args
from utils.config.settings import DoctorConfig, TrainConfig
from utils.errors import AgreedError, is_lost_rank, one_line
from utils.files import expand, write_output
from utils.launch.environment import Topology, is_launched
from utils.launch.exits import exit_with_error, reports_for_machine
from utils.ranks.accelerator import make_accelerator
from utils.ranks.ranks import Ranks
from utils.ranks.session import distributed_session


def main(argv: Sequence[str] | None = None) -> None:
    """Look at the machine, then at all of them together; print what was found; exit with code 1 if any of it is red."""
    guard_output()
    config = parse_args(DoctorConfig, "doctor.py", argv)
    findings, topology, may_meet = check_machine(config)
    if not may_meet:
        report_alone(findings, topology, config)
        raise SystemExit(1)
    if topology.is_main and is_launched():  # a launcher that sees another rank gone ends this one: first it may speak
        signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(3))

    def report_unmet(error: Exception) -> None:
        report_alone([*findings, Finding.of("meeting", error)], topology, config)

    def cannot_connect(text: str) -> None:  # while the main thread still tries to
        report_unmet(ValueError(text))
        os._exit(1)

    with distributed_session("doctor.py", config) as ranks:
        try:
            ranks.join(cannot_connect)
        except (ValueError, RuntimeError, OSError) as error:
            report_unmet(error)
            raise SystemExit(1) from None
        findings, broken = check_run(ranks, config, findings)
        if ranks.is_main:
            report(describe(ranks), findings, config.json)
        if broken:  # nobody to part from
            raise SystemExit(1)
    if red(findings):
        raise SystemExit(1)


def check_run(ranks: Ranks, config: DoctorConfig, findings: list[Finding]) -> tuple[list[Finding], bool]:
    """All that takes the process group, after what each rank found alone; collective.

    Every check is called by all ranks, whatever the one before it found. When one breaks off, as a rank is gone, what
    was found until then is told. Returns (the findings, whether it broke off).
    """
    place = "machines"
    try:
        findings = merged(ranks, findings)
        for place, check in checks(ranks, config):
            ranks.enter(f"checking {place}")
            try:
                found = check()
            except AgreedError as error:  # all ranks know of it, and go on
                found = Finding.of(place, error)
            findings += found if isinstance(found, list) else [found] if found else []
    except Exception as error:
        text = one_line(ranks.record_end(error))
        if not ranks.is_main and not is_lost_rank(error):  # the main process only sees that this rank is gone
            sys.stderr.write(f"doctor.py: rank {ranks.topology.rank}, checking {place}: {text}\n")
        return [*findings, Finding(place, text, False, "what comes after it could not be checked")], True
    return findings, False


def checks(ranks: Ranks, config: DoctorConfig) -> list[tuple[str, Callable[[], Finding | list[Finding] | None]]]:
    """What is checked, in this order; the last needs what those before it were about."""
    facts, made = health.facts_of_all(ranks), []

    def accelerator() -> Accelerator:
        if not made:
            made.append(make_accelerator(ranks, TrainConfig(mixed_precision="no")))
        return made[0]

    alone = [
        ("machines", lambda: health.machines(facts)),
        ("threads", lambda: health.threads(facts)),
        ("versions", lambda: health.versions(facts)),
        ("code", lambda: health.code(facts)),
        ("folder", lambda: health.folder(ranks, config)),
    ]
    several = [
        ("network", lambda: exchange_checks.network(ranks, facts)),
        ("clocks", lambda: exchange_checks.clocks(ranks)),
        ("sums", lambda: exchange_checks.sums(ranks, accelerator())),
        ("all-reduce", lambda: exchange_checks.bandwidth(ranks, config)),
        ("links", lambda: exchange_checks.links(ranks, config, facts)),
    ]
    training = [
        ("samples", lambda: exchange_checks.shards(ranks, accelerator())),
        ("gradients", lambda: exchange_checks.gradients(ranks, accelerator())),
    ]
    return [*alone, *(several if ranks.topology.world_size > 1 else []), *training]


def describe(ranks: Ranks) -> str:
    """What was looked at."""
    machines = len({member.host for member in ranks.members}) or 1
    count = ranks.topology.world_size
    return f"{count} process{'es' * (count > 1)} on {machines} machine{'s' * (machines > 1)}"


def report_alone(findings: Sequence[Finding], topology: Topology | None, config: DoctorConfig) -> None:
    """Say what was found where the processes did not meet; the first rank of each machine speaks for it.

    Nobody else hears of a rank that was started by hand, so it says what is red on it.
    """
    by_hand = not is_launched() and (topology is None or topology.source == "the environment")
    rank = os.environ.get("RANK", "0") if topology is None else topology.rank
    if topology.local_rank == 0 if topology else reports_for_machine() or by_hand:
        file = config.json if topology is None or topology.is_main else None  # the disk may be shared
        report(f"{socket.gethostname()}, rank {rank}; the processes did not meet", findings, file)
    elif by_hand:
        sys.stderr.write("".join(f"doctor.py: rank {rank}, {f.name}: {f.value}\n" for f in findings if f.red))
    else:
        time.sleep(5)  # a launcher that sees this rank gone ends the one that speaks, and this one when that is done


def report(title: str, findings: Sequence[Finding], file: str | None) -> None:
    """Write the file if one was asked for, and print the table and the verdict."""
    error = None
    if file:
        try:
            write_output(expand(file), as_json(findings))
        except OSError as raised:
            error = raised
    wrong, judged = sum(f.red for f in findings), sum(f.ok is not None for f in findings)
    verdict = f"{wrong} of {judged} checks are red" if wrong else f"healthy: all {judged} checks are green"
    print(f"{show(f'Lockstep doctor  {title}', findings, sys.stdout.isatty())}\n{verdict}", flush=True)
    if error:
        exit_with_error(error, "doctor.py")


if __name__ == "__main__":
    main()
