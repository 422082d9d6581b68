"""The contract's version and the hook markers: what `import corerl` gives a plugin, without numpy or torch."""

from __future__ import annotations

import pluggy

API = (2, 0)

PROJECT = "corerl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
