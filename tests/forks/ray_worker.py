"""What Ray starts in place of its own `setup_worker.py`: it has the worker forked. Imports next to nothing."""

from __future__ import annotations

import json
import os
import re
import sys

from asking import become

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


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
    script = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    become(rest, script, environment)


main()
