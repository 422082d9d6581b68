"""What DeepSpeed needs of this machine, for `corerl doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from corerl.plugin.spec import Finding


def probe() -> Iterator[Finding]:
    yield from ()
