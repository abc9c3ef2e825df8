# Read by the job scripts, on the job's first node.

# The job keeps its number when it is put back into the queue, so its run has the same name again. The tasks of an array
# have numbers like 17_3; the number 17 alone would mean all of them.
job=$SLURM_JOB_ID
[ -z "$SLURM_ARRAY_JOB_ID" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
run_name=job-$job

[ -f .venv/bin/activate ] && . .venv/bin/activate
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer asks the job for it

# End the job with a code of slurm/task.sh. A job that was told to stop (75) asks for another turn: the time limit was
# near, or a more urgent job came. A job that scancel has ended is not RUNNING any more, and stays ended.
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
