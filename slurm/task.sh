#!/bin/bash
# Runs a command as a task of srun, and makes its exit code tell whether it was told to stop.
#
# Of several tasks srun reports the highest code. 75 must mean that all were told to stop and none failed, so that lower
# codes of failures become 101 and up. A launcher ends with 1 when it was told to stop, and a process that was told so
# in its first seconds just dies of the signal.
told=
trap 'told=yes' TERM USR1 # SLURM signals the command as well; this shell waits for it and then goes on below
"$@"
code=$?
case $code in
    0 | 75) exit $code ;;
    1 | 138 | 143) [ -z "$told" ] || exit 75 ;;
esac
exit $((code < 75 ? code + 100 : code))
