"""What a run leaves on disk, and how it resumes."""

# the batch sizes of the processes
from utils.runs.batch_sizes import DEFAULT_BATCH, choose_batch, resolve_batch

# saves and deletes the checkpoints of a run
from utils.runs.checkpoint import CheckpointManager

# the folder of a run
from utils.runs.folder import check_run_folder

# the tensors of a checkpoint
from utils.runs.loading import load_weights, make_average, parameters_and_optimizer_state

# log.jsonl
from utils.runs.log import RunLog, check_log, nan_to_none, read_log

# the files of a checkpoint, with their hashes
from utils.runs.manifest import (
    EMA_FILE,
    WEIGHTS_FILE,
    beginnings,
    checkpoints_of,
    damage_of,
    files_of,
    find_checkpoint,
    step_of,
)

# a checkpoint's files besides its tensors
from utils.runs.metadata import (
    Checkpoint,
    config_to_save,
    make_files,
    read_checkpoint,
    read_settings,
    versions,
)

# what a resumed run keeps
from utils.runs.resume import (
    keep_settings,
    restore_state,
    resume_lines,
)

# the training state
from utils.runs.state import TrainState

# --report_to
from utils.runs.trackers import TRACKERS, RunTrackers, numbers_to_send
