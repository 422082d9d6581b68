"""What Ray starts in place of its own `setup_worker.py`: it has the worker forked. Imports next to nothing."""

from __future__ import annotations

import json
import os
import re
import sys

from asking import RAYS, SOCKET, WITH_RAY, WORKERS, become

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
# What raylet tells its workers: the first two, `ray_config.py` writes where Ray's library has them; the third is always
# 0, and the others are read when they are needed, if at all.
RAYLETS = {"RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_USAGE_STATS_ENABLED"}


def main() -> None:
    arguments = sys.argv[1:]
    context = next((each[len(CONTEXT) :] for each in arguments if each.startswith(CONTEXT)), "") or "{}"
    rest = [each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))]
    wanted = json.loads(context)
    environment = dict(os.environ)
    for name, value in (wanted.pop("env_vars", None) or {}).items():
        environment[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    usual = wanted.pop("py_executable", None) or sys.executable
    if usual != sys.executable or any(wanted.values()) or environment.get("CORERL_TEST_FORKS", "off") == "off":
        theirs = os.path.join(os.path.dirname(rest[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, theirs, *arguments])
    own = {name: value for name, value in environment.items() if name.startswith("RAY_") and name not in RAYLETS}
    script = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    become(rest, script, environment, place=WITH_RAY if own == RAYS | WORKERS else SOCKET)


main()
