"""`python -SE python.py ARGUMENTS` is what `python ARGUMENTS` would be, forked; what this does not know is started."""

from __future__ import annotations

import os
import sys

from asking import become

MODULE = """
import runpy, sys
sys.argv[0] = sys.argv.pop(1)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def main(arguments: list[str]) -> None:
    rest, environment = list(arguments), dict(os.environ)
    while rest and rest[0] not in ("-c", "-m"):
        if rest[:2] == ["-X", "faulthandler"]:
            environment["PYTHONFAULTHANDLER"] = "1"
            del rest[:2]
        elif rest[0] in ("-u", "-B", "-P"):
            if rest.pop(0) == "-u":
                environment["PYTHONUNBUFFERED"] = "1"
        else:
            os.execv(sys.executable, [sys.executable, *arguments])
    how, what, *words = rest
    if how == "-c":
        become(["-c", *words], what, environment)
    become(["-m", what, *words], MODULE, environment)


main(sys.argv[1:])
