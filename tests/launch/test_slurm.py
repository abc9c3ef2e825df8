"""slurm/: the job scripts on a real SLURM of two nodes.

python -m pytest -m slurm -s tests/launch/test_slurm.py
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.slurm_lab import ROOT, Slurm, slurm_cluster, why_not
from helpers.training_runs import same_tensors, start, words
from helpers.waiting import PATIENCE, records_so_far, until
from safetensors.torch import load_file

from utils.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(why_not() != "", reason=why_not() or "-")]
FLAGS = words("--model mlp --global_batch_size 128 --threads 1 --timeout 20 --log_every 10")
FLAGS += words("--lr 0.01 --lr_schedule constant --save_every 500 --eval_every 100000")
UPDATES = 2000  # 10 seconds
SCRIPTS = {"tasks": "slurm/train.sbatch", "launchers": "slurm/launcher.sbatch"}
NODES = {"nodes": "slurm/elastic.sbatch"}
SHAPE = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=4"]


@dataclass
class Job:
    """A job of one of the scripts, and the run that it trains."""

    slurm: Slurm
    number: str
    folder: Path

    @property
    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    @property
    def exit_code(self) -> str:
        return self.slurm.job(self.number)["ExitCode"]

    @property
    def output(self) -> str:
        path = self.folder / f"{self.number}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, kind: str) -> list[dict]:
        log = self.folder / f"runs/job-{self.number}/log.jsonl"
        return [record for record in records_so_far(log) if record["kind"] == kind]

    def steps(self, kind: str) -> list[int]:
        return [record["step"] for record in self.records(kind)]

    @property
    def step(self) -> int:
        return max(self.steps("train"), default=0)

    def until(self, condition, what: str, seconds: float = 3 * PATIENCE) -> None:
        """Wait for it; the job's output tells why it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            failed = self.state in {"FAILED", "TIMEOUT", "NODE_FAIL"} - {what}
            text = f"job {self.number} is {self.state}, not {what}:\n{self.output[-4000:]}"
            assert not failed and time.monotonic() < deadline, text
            time.sleep(0.2)

    def until_trained(self, step: int = 300) -> None:
        self.until(lambda: self.step >= step, "training")

    def until_again(self) -> None:
        self.until(lambda: len(self.steps("start")) > 1, "training again")

    def ranks(self) -> list[int]:
        """Its processes that train."""
        return self.slurm.processes(rf"^\S*python -u train.py --run_name job-{self.number} ")

    def gone_after(self, told: float) -> float:
        """Wait until nothing of the turn that was `told` to stop is left; returns the seconds since
        then.
        """
        self.until(lambda: not self.slurm.processes(f"--run_name job-{self.number} "), "gone")
        return time.monotonic() - told

    def until_state(self, *states: str) -> None:
        self.until(lambda: self.state in states, " or ".join(states))


@pytest.fixture(scope="module")
def slurm():
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit a job script; what the test leaves of its jobs is cancelled."""

    def begin(script: str, *flags: str, options: tuple[str, ...] = ()) -> Job:
        return submit_to(slurm, tmp_path, script, *flags, options=options)

    yield begin
    slurm("scancel", "--user=root")
    until(lambda: slurm.states() == ["idle", "idle"])


def submit_to(slurm, folder, script, *flags, options=()) -> Job:
    more = [*FLAGS, "--max_steps", str(UPDATES), "--output_dir", f"{folder}/runs", *flags]
    place = ["--parsable", f"--output={folder}/%j.txt", *SHAPE, *options]
    number = slurm("sbatch", *place, (SCRIPTS | NODES)[script], *more, PROCESSES="1").strip()
    return Job(slurm, number, folder)


@pytest.fixture(scope="module")
def whole(slurm, tmp_path_factory) -> Job:
    """The run that nothing has disturbed."""
    job = submit_to(slurm, tmp_path_factory.mktemp("whole"), "tasks")
    job.until_state("COMPLETED")
    assert job.steps("start") == [0]
    return job


def weights(job: Job, updates: int = UPDATES) -> dict:
    checkpoint = job.folder / f"runs/job-{job.number}/checkpoints/step-{updates:08}"
    return load_file(checkpoint / "model.safetensors")


def check_finished(job: Job, whole: Job) -> list[int]:
    """The job trains to its end, to the weights of the undisturbed run; returns where each of its
    turns started.
    """
    job.until_state("COMPLETED")
    assert same_tensors(weights(job), weights(whole))
    assert job.steps("train") == list(range(10, UPDATES + 1, 10))
    return job.steps("start")


def more_urgent(slurm):
    options = words("--partition=high --nodes=2 --exclusive --output=/dev/null")
    slurm("sbatch", *options, "--wrap=sleep 2")


def without_power(slurm, job, node):
    """A node is away until SLURM has noticed that, after SlurmdTimeout: 15 seconds here, 300 by
    default.
    """
    slurm.power_off(node)
    job.until_state("PENDING")
    slurm.power_on(node)


def without_network(slurm, job):
    slurm.cut("slm2")
    job.until_state("PENDING")
    slurm.heal("slm2")


EVENTS = {
    "scancel --signal=USR1": lambda slurm, job: slurm("scancel", "--signal=USR1", job.number),
    "scancel --signal=TERM": lambda slurm, job: slurm("scancel", "--signal=TERM", job.number),
    "preempted, with a grace period": lambda slurm, job: more_urgent(slurm),
    "preempted at once": lambda slurm, job: more_urgent(slurm),
    "scontrol requeue": lambda slurm, job: slurm("scontrol", "requeue", job.number),
    "network of a node gone": without_network,
    "power of a node gone": lambda slurm, job: without_power(slurm, job, "slm2"),
    "power of the first node gone": lambda slurm, job: without_power(slurm, job, "slm1"),
}
LOSING = [event for event in EVENTS if "gone" in event]
CASES = [("tasks", event) for event in EVENTS]
CASES += [("launchers", event) for event in list(EVENTS)[:4:2] + LOSING[:1]]


@pytest.mark.parametrize(("script", "event"), CASES)
def test_a_job_that_has_to_go_comes_back_by_itself_and_finishes(
    slurm, submit, whole, script, event
):
    job = submit(script, options=("--partition=abrupt",) if event == "preempted at once" else ())
    job.until_trained()
    reached, told = job.step, time.monotonic()
    EVENTS[event](slurm, job)
    gone = job.gone_after(told)
    job.until_again()
    again = time.monotonic() - told
    starts = check_finished(job, whole)
    print(f"\n| {script} | {event} | {gone:.1f} s | {again:.0f} s | {reached} | {starts[1]} |")
    # SLURM's word to end the first turn may come late, to the second, which then has a third
    if event in LOSING:
        assert starts[1] >= reached - 500
    else:
        assert len(starts) == 2 and starts[1] >= reached


def test_nodes_of_an_array_come_and_go_and_the_run_keeps_its_bits(slurm, submit):
    bitwise = ["--microbatches", "2", "--save_every", "500", "--max_steps", "20000"]
    alone = submit("tasks", *bitwise, options=("--nodes=1",))
    slurm("scontrol", "update", "NodeName=slm2", "State=DRAIN", "Reason=away")
    alone.until_state("COMPLETED")
    run = submit("nodes", *bitwise, options=("--array=0-1", "--nodes=1", "--exclusive"))
    try:
        run.until(lambda: run.step >= 100, "training on one node")
        slurm("scontrol", "update", "NodeName=slm2", "State=RESUME")
        run.until(
            lambda: [r["processes"] for r in run.records("start")] == [1, 2],
            "training on two nodes",
        )
        slurm("scontrol", "requeue", f"{run.number}_0")
        run.until(lambda: len(run.records("start")) > 2, "training again")
        run.until(lambda: run.step == 20000, "complete")
    finally:
        (ROOT / f"job-{run.number}.store").unlink(missing_ok=True)
    print([(record["processes"], record["step"]) for record in run.records("start")])
    assert run.steps("train") == list(range(10, 20001, 10))
    run.until(
        lambda: (run.folder / f"runs/job-{run.number}/checkpoints/step-00020000").exists(), "saved"
    )
    assert same_tensors(weights(run, 20000), weights(alone, 20000))


def test_a_sweep_on_two_nodes_ends_with_the_runs_of_train_py_though_one_is_lost(slurm, tmp_path):
    flags = [*FLAGS, "--max_steps", str(UPDATES), "--output_dir", f"{tmp_path}/runs"]
    shape = ["--array=0-1", "--nodes=1", "--ntasks-per-node=1", "--exclusive", "--gpus-per-node=1"]
    place = ["--parsable", f"--output={tmp_path}/%a.txt", "--cpus-per-task=4", *shape]
    own = words("--name lr --seeds 2 --grid lr_schedule=constant,linear --")
    own += [word for word in flags if word not in ("--lr_schedule", "constant")]
    number = slurm("sbatch", *place, "slurm/sweep.sbatch", *own).strip()
    folders = [
        tmp_path / f"runs/lr/lr_schedule={name}-seed{seed}"
        for name in ("constant", "linear")
        for seed in "01"
    ]

    def states() -> list[str]:
        files = [folder / "status.json" for folder in folders]
        return [read_json(file)["state"] for file in files if file.exists()]

    try:
        until(lambda: states().count("running") == 2, 3 * PATIENCE)
        slurm.power_off("slm2")
        until(lambda: "complete" in states(), 3 * PATIENCE)
        slurm.power_on("slm2")
        until(lambda: states() == ["complete"] * 4, 3 * PATIENCE)
        until(lambda: slurm.states() == ["idle", "idle"], 3 * PATIENCE)
    finally:
        slurm("scancel", number, check=False)
    said = "".join((tmp_path / f"{task}.txt").read_text() for task in "01")
    assert "2 seeds cannot distinguish" in said or "is the best: 2 seeds" in said, said[-3000:]
    print(
        [
            [r["step"] for r in records_so_far(f / "log.jsonl") if r["kind"] == "start"]
            for f in folders
        ]
    )
    code, _, err = start("python", ROOT / "train.py", *flags, "--run_name", "alone")
    assert code == 0, err
    name = f"checkpoints/step-{UPDATES:08}/model.safetensors"
    found = [load_file(folder / name) for folder in (folders[0], tmp_path / "runs/alone")]
    assert same_tensors(*found)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_longer_than_its_time_limit_takes_several_turns(slurm, submit, whole, script):
    """Over a slow network it takes more than a minute; the signal comes 30 to 60 seconds after the
    start of a turn.
    """
    slurm.slow_down("slm2")
    job = submit(script, options=("--time=1", "--signal=USR1@1"))
    try:
        job.until(lambda: len(job.records("start")) > 1, "in its second turn")
    finally:
        slurm.speed_up("slm2")
    starts = check_finished(job, whole)
    print(f"\n| {script} | time limit of a minute | turns started from updates {starts} |")
    assert starts == sorted(set(starts)) and int(job.slurm.job(job.number)["Restarts"]) >= 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_in_the_first_seconds_costs_no_more_than_the_turn(submit, whole, script):
    job = submit(script)
    job.until_state("RUNNING")
    job.until(
        lambda: "StepId" in job.slurm("scontrol", "show", "steps", check=False), "running a step"
    )
    time.sleep(1)
    job.slurm("scancel", "--signal=TERM", job.number)
    job.until_state("PENDING")
    assert check_finished(job, whole) == [0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scancel_saves_ends_and_is_final(submit, script):
    job = submit(script)
    job.until_trained()
    reached, told = job.step, time.monotonic()
    job.slurm("scancel", job.number)
    gone = job.gone_after(told)
    saved = max(int(path.name[5:]) for path in job.folder.glob("runs/*/checkpoints/step-*"))
    print(f"\n| {script} | scancel | {gone:.1f} s | stays ended | {reached} | {saved} |")
    time.sleep(8)
    assert job.state == "CANCELLED" and saved >= reached


def test_each_task_of_an_array_is_a_run_that_comes_back_alone(slurm, submit):
    """The last task has the number of the whole array, and must not put all of it back."""
    array = submit(
        "tasks", options=("--array=0-1", "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2")
    )
    tasks = [Job(slurm, f"{array.number}_{index}", array.folder) for index in (0, 1)]
    for task in tasks:
        task.until_trained()
    slurm("scancel", "--signal=USR1", tasks[1].number)
    for task in tasks:
        task.until_state("COMPLETED")
    first, second = (task.steps("start") for task in tasks)
    assert first == [0] and len(second) == 2 and second[1] >= 300
    assert [slurm.job(task.number)["Restarts"] for task in tasks] == ["0", "1"]


def test_a_killed_rank_ends_the_job_under_tasks(slurm, submit):
    job = submit("tasks")
    job.until_trained()
    told = time.monotonic()
    os.kill(job.ranks()[-1], signal.SIGKILL)
    job.until_state("FAILED")
    print(
        f"\n| tasks | kill -9 of a rank | {job.gone_after(told):.1f} s "
        f"| fails with {job.exit_code} |"
    )
    assert job.exit_code == "137:0" and slurm.job(job.number)["Restarts"] == "0"


KILLED = """
import os, signal, time
from pathlib import Path
from utils.training.optim import OPTIMIZERS

sgd, steps = OPTIMIZERS["sgd"], []


def kill(optimizer, *given):
    steps.append(optimizer)
    first_of_rank_1 = os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if len(steps) == 700 and first_of_rank_1:
        while not list(Path("RUNS").glob("job-*/checkpoints/step-00000500")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def killed_sgd(*given):
    optimizer = sgd(*given)
    optimizer.register_step_post_hook(kill)
    return optimizer


OPTIMIZERS["sgd"] = killed_sgd
"""


def test_a_killed_rank_is_started_again_by_launchers_within_the_job(submit, whole, tmp_path):
    """It kills itself after update 700, as soon as update 500 is saved."""
    plugin = tmp_path / "killed.py"
    plugin.write_text(KILLED.replace("RUNS", f"{tmp_path}/runs"))
    job = submit("launchers", "--plugin", plugin, "--timeout", str(PATIENCE))
    starts = check_finished(job, whole)
    assert starts == [0, 500] and job.slurm.job(job.number)["Restarts"] == "0"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_error_is_the_job_s_exit_code_and_no_turn_follows(submit, script):
    job = submit(script, "--model", "no_such_model", "--timeout", str(PATIENCE))
    job.until_state("FAILED")
    assert job.exit_code == {"tasks": "2:0", "launchers": "1:0"}[script]
    assert "no_such_model" in job.output


def test_srun_on_two_nodes_gives_the_losses_of_one_process(whole, tmp_path):
    one = [*FLAGS, "--max_steps", "200", "--output_dir", str(tmp_path), "--run_name", "one"]
    code, _, error = start("python", ROOT / "train.py", *one)
    assert code == 0, error
    log = records_so_far(tmp_path / "one/log.jsonl")
    losses = [record["loss"] for record in log if record["kind"] == "train"]
    expected = [record["loss"] for record in whole.records("train")][:20]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert "rank 0     slm1" in whole.output and "rank 1     slm2" in whole.output
