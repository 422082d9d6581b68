"""The specs of the commands, which `corerl --help` reads: their code is imported when one is chosen."""

from corerl.plugin import CommandSpec

NEW_BACKEND = CommandSpec(
    implementation="corerl_testing.new_backend:add_arguments",
    api=(2, 0),
    summary="generate a package with a working training backend",
)
VERIFY = CommandSpec(
    implementation="corerl_testing.verify:add_arguments",
    api=(2, 0),
    summary="check that a training backend or an algorithm meets the contract",
)
