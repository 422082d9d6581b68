"""The specs of the commands, which `corerl --help` reads, and of the extension: their code is imported when used."""

from corerl.plugin import CommandSpec, ExtensionSpec, Process

DOCTOR = CommandSpec(
    implementation="corerl_doctor.command:add_arguments",
    api=(2, 0),
    summary="diagnose the installation, a plugin or a run",
)
PLUGINS = CommandSpec(
    implementation="corerl_doctor.listing:add_arguments",
    api=(2, 0),
    summary="list the installed plugins of every kind and their state",
)
OPTIONS = CommandSpec(
    implementation="corerl_doctor.listing:add_options",
    api=(2, 0),
    summary="print a plugin's settings, or all of a run, as TOML with their help",
)
ADVICE = ExtensionSpec(
    implementation="corerl_doctor.advice:Advising",
    api=(2, 0),
    summary="notices before the first step: what a run trains, samples and reads otherwise than may be meant",
    process=Process.DRIVER,
    joins="always",
    plans=True,
)
