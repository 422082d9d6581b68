"""Tell which of Ray's processes has died where Ray ends this one for it, without a word.

Ray calls `_exit` in a process that is at its object store when raylet dies; nothing in that process can come before it.
So another one looks on: it gets a line for each of Ray's processes, behind the descriptor by which it hears of its end,
and says the line of the first in that order that has died, unless its standard input, which comes from the driver,
brings a byte before it ends. If the driver itself is what ends first, it says nothing; nor if both have ended before it
looks, since all of Ray's processes end with a driver. Read in Ray 2.60.

A script, to be run by `python -IS`: it imports next to nothing.
"""

import contextlib
import os
import select
import sys
import time

DRIVER = 0  # standard input
TOGETHER_SECONDS = 0.2  # for raylet's own end to be seen after that of its agents, which end with it


def main() -> None:
    # To be there before what follows from a death, whatever this was started under. To leave SCHED_IDLE takes a
    # privilege.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    lines = {int(descriptor): line for descriptor, _, line in (each.partition(":") for each in sys.argv[1:])}
    waiting = select.epoll()
    for descriptor in (DRIVER, *lines):
        waiting.register(descriptor, select.EPOLLIN)
    if DRIVER in dict(waiting.poll()):
        return
    waiting.unregister(DRIVER)  # what comes of it is read
    time.sleep(TOGETHER_SECONDS)
    ended = dict(waiting.poll(0))
    if not os.read(DRIVER, 1):
        print(next(line for descriptor, line in lines.items() if descriptor in ended), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
