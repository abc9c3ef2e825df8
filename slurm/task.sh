#!/bin/bash
# Runs a command as a task of srun, and exits with 75 if it was stopped by a signal.
#
# srun reports the highest exit code of its tasks. 75 must mean that all tasks were stopped and none failed, so 100 is
# added to lower codes of failures. A launcher that was stopped exits with 1, and a process that is stopped in its first
# seconds is killed by the signal.
stopped=
trap 'stopped=yes' TERM USR1 # SLURM signals the command as well; this shell waits for it and then continues below
"$@"
code=$?
case $code in
    0 | 75) exit $code ;;
    1 | 138 | 143) [ -z "$stopped" ] || exit 75 ;;
esac
exit $((code < 75 ? code + 100 : code))
