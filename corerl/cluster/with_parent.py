"""Run one of raylet's agents, the program that the arguments name, so that it ends with raylet, but not raylet with it.

An agent whose raylet is gone tells GCS of it, which the driver prints in many lines; or tries to, for a minute.
Raylet notices at once that an agent is gone, and ends itself and all ranks; Ray ends the driver too, without a word, if
it holds a shared object. So raylet hears of it later, when the driver has had the time to end the run. Read in Ray
2.60.

A script, to be run by `python -IS`: it imports next to nothing.
"""

import ctypes
import os
import sys
import time

PR_SET_PDEATHSIG, SIGKILL = 1, 9
HEARD_SECONDS = 30.0


def main() -> None:
    end_with_parent = ctypes.CDLL(None).prctl
    end_with_parent(PR_SET_PDEATHSIG, SIGKILL)
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())  # whom the agent takes for its parent
    reads, _ = os.pipe()  # an agent may also take the end of its standard input for that of raylet
    agent = os.fork()
    if agent == 0:
        end_with_parent(PR_SET_PDEATHSIG, SIGKILL)
        os.dup2(reads, 0)
        os.execv(sys.argv[1], sys.argv[1:])
    _, status = os.waitpid(agent, 0)
    time.sleep(HEARD_SECONDS)
    os._exit(1 if status else 0)


if __name__ == "__main__":
    main()
