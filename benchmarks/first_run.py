"""The output of the first run, `make train`, of which README.md shows a part.

    python benchmarks/first_run.py --json benchmarks/records/first_run.json

In the record, the name of this machine is replaced by `laptop`, and the folder of the repository by
`/home/me/lockstep`.
"""

import platform

from common import ROOT, flags, launch, parse_flags, report, run, temporary


def output() -> list[str]:
    """The lines that train.py prints on two processes with its defaults."""
    with temporary() as folder:
        command = [*launch(2, "cpu"), ROOT / "train.py", *flags(output_dir=folder / "runs")]
        lines, _ = run(command, env={"CUDA_VISIBLE_DEVICES": ""})
        text = "".join(line for _, line in lines)
        others = {f"{folder}/": "", str(ROOT): "/home/me/lockstep", platform.node(): "laptop"}
        for found, shown in others.items():
            text = text.replace(found, shown)
    return text.splitlines()


def main() -> None:
    args = parse_flags(__doc__, rounds=1)
    lines = output()
    report(args, ["output"], [[line] for line in lines], {"output": lines})


if __name__ == "__main__":
    main()
