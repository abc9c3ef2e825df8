"""Save checkpoints of a run. The main process completes each one in a thread while training continues."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from utils.errors import AgreedError, one_line
from utils.runs.checkpoint import partial_of, publish, update_pointers, write_checkpoint
from utils.runs.metadata import metadata_files
from utils.training.divergence import check_weights
from utils.training.run import Run, Saving


def save(run: Run) -> None:
    """Write a checkpoint, then agree on stopping; collective.

    All ranks wait until the tensors are written. A thread of the main process does the rest, see `finish_save`.
    """
    finish_save(run)
    state, ranks, step = run.state, run.ranks, run.state.step
    ranks.mark(f"after update {step}, saving")
    ranks.run_on_all(partial(check_weights, run.module, run.plan, run.data.train, step))
    spec = {"input": asdict(run.spec)}
    files = metadata_files(run.config, state, run.plan, ranks, run.data, spec) if ranks.is_main else {}
    unfinished = partial_of(run.folder.checkpoints, step)

    def check_folder_and_log() -> None:
        run.folder.check_own()
        run.log.sync()

    try:
        ranks.run_on_all(check_folder_and_log)
        write_checkpoint(ranks, run.accelerator, unfinished, files, run.parts)
        run.saving = Saving(step, (state.best, state.best_step))
        if ranks.is_main:
            update = partial(update_pointers, unfinished.parent, step, state.best_step, run.config.keep)
            published = run.saving.published = run.saver.submit(_complete, run, unfinished)
            run.saving.pointers_updated = run.saver.submit(lambda: (published.result(), update()))
    except (OSError, AgreedError) as error:
        _report(run, error, f"update {step} could not be saved", bool(run.ended) or run.stopping.agreed)
    run.meter.restart_save_clock()
    run.stopping.agreed = ranks.any_rank(run.stopping.agreed or run.stopping.requested)
    if run.ended or run.stopping.agreed:  # no save follows
        finish_save(run, is_last=True)


def _complete(run: Run, unfinished: Path) -> None:
    """Complete a checkpoint. `run` is given because it holds the lock on the folder, even if training has failed."""
    publish(unfinished)


def finish_save(run: Run, is_last: bool = False) -> None:
    """Wait until the last checkpoint is complete; collective. If it cannot be completed, act as --if_save_fails says.

    Call this before an evaluation: after a failed save, `state.best` is reset to the best checkpoint on disk.
    """
    saving, run.saving, saved = run.saving, None, False
    if saving is None:
        return
    run.ranks.mark(f"after update {run.state.step}, completing the checkpoint of update {saving.step}")
    try:
        run.ranks.run_on_main(lambda: saving.published.result())
        saved, run.saved_best = True, saving.best
        run.ranks.run_on_main(lambda: saving.pointers_updated.result())
    except (OSError, AgreedError) as error:
        what = "was saved, but `latest` or `best` was not updated" if saved else "could not be saved"
        _report(run, error, f"update {saving.step} {what}", is_last)


def _report(run: Run, error: Exception, what: str, is_last: bool) -> None:
    """Raise the error of a save, or report it if the run continues."""
    if run.config.if_save_fails == "stop" or is_last:
        raise error
    run.state.best, run.state.best_step = run.saved_best
    run.log.say(f"{what}: {one_line(error)}")
