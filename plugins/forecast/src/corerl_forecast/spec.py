"""What the entry point names: the extension described, importable without torch."""

from __future__ import annotations

from corerl.plugin import ExtensionSpec, NoOptions, Process

SPEC = ExtensionSpec(
    implementation="corerl_forecast.extension:Forecasting",
    config=NoOptions,
    api=(2, 0),
    summary="memory predicted before the first step, recomputation chosen by it, slow paths with their price",
    process=Process.DRIVER,
    joins="always",
    plans=True,
)
