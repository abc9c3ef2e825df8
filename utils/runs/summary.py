"""The tables and lines that a run prints."""

from typing import Any

from utils.runs.state import TrainState


def start_rows(run: Any, places: list[str]) -> list[tuple[str, str]]:
    """The rows of the table that a run (train.py's) starts with; `places` are where the ranks are."""
    plan, processes, parameters = run.plan, len(places), sum(p.numel() for p in run.module.parameters())
    over = f" on {run.ranks.interface}" if run.ranks.interface else ""
    return [
        *((f"rank {rank}", place) for rank, place in enumerate(places)),
        ("backend", f"{run.ranks.backend}{over}, precision {run.accelerator.mixed_precision}"),
        ("data", f"{run.config.data}: {plan.samples} training, {len(run.data.evaluation)} {run.data.evaluation.name}"),
        ("model", f"{run.config.model}, {parameters:,} parameters, {run.spec.describe()} images"),
        ("batch", plan.describe(processes)),
        ("updates", f"{plan.updates_per_epoch} per epoch, {run.updates} in all, from {run.state.step}"),
    ]


def evaluation_line(record: dict) -> str:
    return (
        f"update {record['step']}  {record['split']}: accuracy {record['accuracy']:.4f}  top-5 {record['top5']:.4f}  "
        f"loss {record['loss']:.4f}  ({record['count']} samples, {record['seconds']:.1f} s)"
    )


def result_rows(state: TrainState, result: dict | None, done: bool) -> list[tuple[str, str]]:
    """The rows of a run's last table."""
    rows = [("accuracy", f"{result['accuracy']:.4f}"), ("loss", f"{result['loss']:.4f}")] if result else []
    if done and result is None:
        rows = [("finished", f"{state.step} updates were done before; raise --epochs or --max_steps to go on")]
    if state.best_accuracy is not None:
        rows.append(("best", f"{state.best_accuracy:.4f} at update {state.best_step}"))
    return [*rows, ("training", f"{state.seconds:.1f} s, {state.images / max(state.seconds, 1e-9):.0f} images/s")]
