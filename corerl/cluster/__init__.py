"""Processes on machines: the only package that imports ray."""

import os

# Ray reads these when it is imported: a line of one process is not left out because another's is like it, and there are
# no control codes around what Ray itself has to say.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_COLOR_PREFIX", "0")
