"""The process group: what the ranks agree on, and when they stop."""

# the accelerator of a run
from utils.ranks.accelerator import (
    check_precision,
    check_sharding,
    compile_model,
    leave_run,
    make_accelerator,
    search_pays,
)

# what the ranks agree on and exchange besides Accelerate
from utils.ranks.ranks import Ranks

# joins the processes; after an error, all of them exit
from utils.ranks.session import distributed_session

# signals that stop a run
from utils.ranks.stopping import EXIT_RESUME, Stopping, signals_to_handle
