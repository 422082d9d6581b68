"""Run processes on machines; the only package that imports ray."""

import os

# Ray reads these on import: do not drop a process's line because it resembles another's, and do not put color codes
# around Ray's own output.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_COLOR_PREFIX", "0")
