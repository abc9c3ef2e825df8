"""Print a line after a process has exited: `python repeat.py PROCESS TEXT`. `exits.py` starts this file.

A launcher prints a traceback of 30 lines when its processes exit, so what they print can never be the last line. This
process ends without a line if the launcher has not exited after ten minutes: it waits for other ranks, 30 seconds or
$PET_SHUTDOWN_TIMEOUT.
"""

import os
import select
import sys
from contextlib import suppress

if __name__ == "__main__":
    process, text = sys.argv[1:]
    with suppress(OSError, AttributeError):  # it has exited, or the system has no pidfd_open
        if not any(select.select([os.pidfd_open(int(process))], [], [], 600)):
            sys.exit()
    start = "\r\x1b[K" if sys.stderr.isatty() else ""  # a shell may have printed its prompt
    print(f"{start}{text}", file=sys.stderr)
