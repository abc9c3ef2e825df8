"""Save a checkpoint of a run."""

from dataclasses import asdict
from functools import partial

from utils.errors import AgreedError, one_line
from utils.runs.checkpoint import save_checkpoint, update_pointers
from utils.runs.metadata import metadata_files
from utils.training.divergence import check_weights
from utils.training.run import Run


def save(run: Run) -> None:
    """Write a checkpoint and delete old ones, then agree on stopping; collective."""
    config, state, ranks, scaler = run.config, run.state, run.ranks, run.accelerator.scaler
    more = {"input": asdict(run.spec), "scaler": scaler and scaler.state_dict()}
    files = metadata_files(config, state, run.plan, ranks, run.data, more)
    folder, step, saved = run.folder.checkpoints, state.step, False
    ranks.mark(f"after update {step}, saving")
    ranks.run_on_all(partial(check_weights, run.module, run.plan, run.data.train, step))

    def check_folder_and_log() -> None:
        run.folder.check_own()
        run.log.sync()

    try:
        ranks.run_on_all(check_folder_and_log)
        save_checkpoint(ranks, run.accelerator, folder, step, files)
        saved, run.saved_best = True, (state.best, state.best_step)
        move = partial(update_pointers, folder, step, state.best_step, config.keep)
        ranks.run_on_main(move)
    except (OSError, AgreedError) as error:
        is_last = step >= run.updates or run.stopping.agreed  # there is no next save
        if config.if_save_fails == "stop" or is_last:
            raise
        state.best, state.best_step = run.saved_best
        what = "was saved, but `latest` or `best` was not updated" if saved else "could not be saved"
        run.log.say(f"update {step} {what}: {one_line(error)}")
    run.meter.restart_save_clock()
    run.stopping.agreed = ranks.any_rank(run.stopping.agreed or run.stopping.requested)
