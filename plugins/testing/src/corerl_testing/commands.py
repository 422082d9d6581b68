"""The specs of the commands, which `corerl --help` reads: their code is imported when one is chosen."""

from corerl.plugin import CommandSpec

MODELS = CommandSpec(
    implementation="corerl_testing.models_command:add_arguments",
    api=(2, 0),
    summary="list transformers' language models: packed, whole, or refused and why",
)
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
