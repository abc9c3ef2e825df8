"""How a process is started, which device it has, and how it exits."""

# the command that started this process
from utils.launch.command import (
    launcher_pid,
    precision_is_chosen,
    resume_command,
    script_command,
    typed_command,
)

# GPUs and NCCL
from utils.launch.devices import (
    choose_backend,
    choose_device,
    cpu_is_requested,
    gpu_id,
    nccl_version,
    nvidia_smi,
)

# what the launcher has set
from utils.launch.environment import (
    Topology,
    attempts_left,
    can_be_restarted,
    compile_backend,
    is_launched,
    is_set,
    local_rank_and_size,
    read_topology,
    shards_model,
    threads_per_process,
)

# errors: one rank prints them, and all exit
from utils.launch.exits import (
    delay_exit,
    exit_now,
    exit_with_error,
    fix_for_memory,
    how_to_resume,
    inform_launcher,
    is_out_of_memory,
    print_last_line,
    print_line,
    reports_for_machine,
    with_known_fix,
    with_rank,
)

# network interfaces
from utils.launch.network import address_of, set_interface

# status.json of a run
from utils.launch.status import begin_status, end_status, update_status
