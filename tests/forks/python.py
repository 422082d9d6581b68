"""`python -SE python.py ARGUMENTS` is what `python ARGUMENTS` would be, forked; what this does not know is started."""

from __future__ import annotations

import os
import sys

from asking import become

# Ray's own processes that a driver starts: each imports Ray, and little else that a fork has not. What raylet starts is
# none of them: it has to end with raylet, at once, and its interpreter is that of a node's workers.
RAYS_OWN = ("/ray/_private/log_monitor.py", "/ray/autoscaler/_private/monitor.py", "/ray/dashboard/dashboard.py")
SCRIPT = """
import runpy, sys
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MODULE = """
import runpy, sys
sys.argv[0] = sys.argv.pop(1)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def main(arguments: list[str]) -> None:
    descriptors: tuple[int, ...] = ()
    if arguments[0] == "--descriptors":
        descriptors = tuple(map(int, arguments[1].split(",")))
        arguments = arguments[2:]
    rest, environment = list(arguments), dict(os.environ)
    while rest and rest[0] not in ("-c", "-m"):
        if rest[:2] == ["-X", "faulthandler"]:
            environment["PYTHONFAULTHANDLER"] = "1"
            del rest[:2]
        elif rest[0] in ("-u", "-B", "-P"):
            if rest.pop(0) == "-u":
                environment["PYTHONUNBUFFERED"] = "1"
        elif rest[0].endswith(RAYS_OWN):
            become(rest, SCRIPT, environment)
        else:
            rest = []
    if not rest:
        os.execv(sys.executable, [sys.executable, *arguments])
    how, what, *words = rest
    if how == "-c":
        become(["-c", *words], what, environment, descriptors=descriptors)
    become(["-m", what, *words], MODULE, environment)


main(sys.argv[1:])
