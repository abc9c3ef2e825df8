# Sourced by the job scripts, on the first node of the job.

# A requeued job keeps its number, so its run keeps its name. The tasks of an array have numbers such as 17_3, because
# 17 refers to all of them.
job=$SLURM_JOB_ID
[ -z "$SLURM_ARRAY_JOB_ID" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
run_name=job-$job

[ -f .venv/bin/activate ] && . .venv/bin/activate
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer reads it from the job

# End the job with an exit code of slurm/task.sh. A job that was stopped (75), because its time limit was near or it was
# preempted, is requeued for another turn. A job that was cancelled with scancel is no longer RUNNING: it is not requeued.
end_job() {
    local code=$1 turns=${SLURM_RESTART_COUNT:-0}
    ((code > 100 && code < 128)) && code=$((code - 100))
    if ((code == 75)) && [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
        if ((turns >= ${MAX_TURNS:-100})); then
            echo "job $job has had $((turns + 1)) turns; it ends here. MAX_TURNS=N allows more" >&2
        elif scontrol requeue "$job"; then
            echo "job $job waits for its next turn"
        fi
    fi
    exit "$code"
}
