"""The specs of the commands, which `corerl --help` reads: their code is imported when one is chosen."""

from corerl.plugin import CommandSpec

DOCTOR = CommandSpec(
    implementation="corerl_doctor.command:add_arguments",
    api=(2, 0),
    summary="diagnose the installation, a plugin or a run",
)
