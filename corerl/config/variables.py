"""Names of environment variables; which of them have done their work before a rank or an engine can set them."""

from __future__ import annotations

import re

# What the loader, Python and libraries of numpy read as a process starts. Others can set it only through Ray's runtime
# environments, which Ray logs. Programs have keys in variables that begin alike, such as LD_SDK_KEY.
READ_AT_START = re.compile(
    r"LD_(PRELOAD|LIBRARY_PATH|AUDIT|BIND_NO[TW]|DEBUG\w*|HWCAP_MASK|PROFILE\w*)$|PYTHON[A-Z]+$|PYTHON_GIL$|"
    r"MALLOC_[A-Z_]+$|GLIBC_TUNABLES$|(OMP|KMP|GOMP|MKL|OPENBLAS)_|LC_[A-Z]+$|(LANG|TZ)$"
)
RAYS = re.compile(r"RAY_")  # read by Ray's own processes, which are there before those of a run
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # the network interface over which gloo's ranks talk
