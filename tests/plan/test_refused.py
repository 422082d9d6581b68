"""What a config is refused for: one row for each message, with the setting that it names and a few of its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from corerl.config.load import config_of
from corerl.errors import UserError
from corerl.plan.make import make_plan
from tests.driver.saved import DATA

CRITIC = "algorithm.name=ppo roles.critic.ranks=1"
KL = "algorithm.kl_coef=0.1"
RECOMPUTE = "algorithm.old_logprobs=recompute"
TURNS = "cluster.offload=always"
# Problems of one round are told together: plugins that are not there, settings that cannot be, what these name.
NAMES = 'backend.name=plian rollout.engine=fakee algorithm.name=grop extensions=[{name="jsnol"}]'
TABLES = "engines.fake.no=1 backends.plain.no=1 rollout.saved=x model.path=/nope model.config={}"
NAMED = "reward.name=exakt-match data.source=nope algorithm.loss=cliped algorithm.advantages=no_such_module:f"
NAMED += " train.aux_loss_coef=0.1"
SETS = 'eval.sets=[{source="sort-digits",name="a"'

# Overrides of a sound config, the setting that the error names, words of the error.
ROWS = """
run.mode=eval data.held_out=0                             | data.held_out              | [[eval.sets]]
run.mode=train-only                                       | rollout.saved              | empty
run.mode=rollout-only rollout.source=one-step-off         | rollout.source             | needs run.mode to be 'train'
run.dir=/dev/null/run                                     | run.dir                    | cannot write
rollout.saved=x                                           | rollout.saved              | needs run.mode to be
rollout.max_staleness=2                                   | rollout.max_staleness      | to be 'asynchronous'
rollout.source=asynchronous weights.every=2 checkpoint.every=4 | weights.every         | 'synchronous' or 'streamed'
rollout.prompts=7 train.mini_batches=2                    | rollout.prompts            | use a multiple of 2, such as 8
rollout.prompts=1048576 rollout.samples=9                 | rollout.prompts            | samples per step
rollout.prompts=7 rollout.samples=3 roles.actor.ranks=2 backend.name=fsdp | rollout.prompts | evenly over
rollout.samples=1                                         | rollout.samples            | at least 2
train.share_prefixes=true train.layout=whole              | train.share_prefixes       | padded rows
rollout.max_tokens=200 rollout.context_length=100         | rollout.max_tokens         | no room for a prompt
rollout.stop=["x"] data.held_out=0                        | rollout.stop               | 'x'
rollout.engine=fakee                                      | rollout.engine             | unknown engine
rollout.sampler=promts                                    | rollout.sampler            | unknown sampler
rollout.postprocess=no_such_module:f                      | rollout.postprocess        | no_such_module
weights.every=3                                           | checkpoint.every           | multiple of weights.every=3
weights.transport=colective                               | weights.transport          | did you mean 'collective'
weights.quantize=fp8                                      | weights.quantize           | takes none
weights.lora=adapter                                      | weights.lora               | needs lora
weights.versions=2                                        | weights.versions           | needs weights.lora to be
checkpoint.resume=nver                                    | checkpoint.resume          | does not exist
checkpoint.memory=true cluster.address=h:1 | checkpoint.memory | does not go with cluster.address
algorithm.name=grop                                       | algorithm.name             | unknown algorithm
algorithm.kl_in=reward                                    | algorithm.kl_in            | needs algorithm.kl_coef
{KL} algorithm.kl_in=reward algorithm.kl_estimator=k3-differentiated | algorithm.kl_estimator | 'loss'
{KL} algorithm.kl_in=reward algorithm.old_logprobs=rollout | algorithm.kl_in           | to be 'recompute'
{KL} algorithm.kl_in=reward algorithm.dynamic_sampling=2  | algorithm.dynamic_sampling | does not go with
{KL} algorithm.reference=/nope                            | algorithm.reference        | is not a directory
{KL} algorithm.reference_every=7                          | checkpoint.every           | algorithm.reference_every=7
algorithm.reference_every=5                               | algorithm.reference_every  | needs algorithm.kl_coef
algorithm.correction=token                                | algorithm.correction       | to be 'recompute'
{RECOMPUTE} algorithm.correction=token algorithm.correction_floor=3.0 | algorithm.correction_floor | above
algorithm.correction_floor=0.5                            | algorithm.correction_floor | needs algorithm.correction
algorithm.correction_cap=3.0                              | algorithm.correction_cap   | needs algorithm.correction
algorithm.correction_beyond=mask                          | algorithm.correction_beyond | needs algorithm.correction
algorithm.routing_replay=engine                           | algorithm.routing_replay   | no experts
algorithm.overlong=penalty algorithm.overlong_buffer=1000 | algorithm.overlong_buffer  | 'penalty' needs 1 to
algorithm.overlong_buffer=5                               | algorithm.overlong_buffer  | the others 0
algorithm.loss=cliped                                     | algorithm.loss             | cliped
algorithm.advantages=no_such_module:f                     | algorithm.advantages       | no_such_module
algorithm.postprocess=no_such_module:f                    | algorithm.postprocess      | no_such_module
algorithm.dynamic_sampling_on=x                           | algorithm.dynamic_sampling_on | 'x'
algorithm.name=dapo rollout.source=streamed               | algorithm.dynamic_sampling | change that, or set this to 0
algorithm.name=ppo                                        | roles.critic               | needs a critic
roles.critic.ranks=1                                      | roles.critic               | uses no critic
{CRITIC} algorithm.advantages=json:dumps                  | algorithm.advantages       | critic
{CRITIC} algorithm.dynamic_sampling=2                     | algorithm.dynamic_sampling | equal rewards teach too
{CRITIC} roles.critic.train.mini_batches=3 | rollout.prompts | roles.critic.train.mini_batches=3
{CRITIC} roles.critic.model.vocabulary=3                  | roles.critic.model.config  | no model
{CRITIC} roles.critic.model={{path="/",config={{a=1}}}}   | roles.critic.model.config  | does not go with
{CRITIC} roles.critic.model.path=/none                    | roles.critic.model.path    | no directory
{CRITIC} roles.critic.options.no=1                        | roles.critic.options.no    | unknown key
{CRITIC} roles.critic.backend=plian                       | roles.critic.backend       | did you mean 'plain'
{CRITIC} roles.critic.lora.targets=["lm_head"]            | roles.critic.lora.targets  | lm_head
roles.reference.ranks=1                                   | roles.reference            | needs algorithm.kl_coef
{KL} roles.reference.ranks=1 algorithm.reference_every=50 | algorithm.reference_every | does not go with roles.reference
{KL} roles.reference.train.mini_batches=2                 | roles.reference.train.mini_batches | never trained
{KL} roles.reference.lora.rank=2                          | roles.reference.lora       | never trained
lora.targets=["q_porj"]                                   | lora.targets               | did you mean 'q_proj'
lora.path=/nope                                           | lora.path                  | cannot be read
lora.rank=2 {KL} algorithm.reference=/                    | algorithm.reference        | does not go with lora
rollout.source=streamed algorithm.dynamic_sampling=2      | algorithm.dynamic_sampling | 'streamed'
rollout.source=streamed rollout.postprocess=json:dumps    | rollout.postprocess        | 'streamed'
rollout.source=streamed algorithm.advantages=json:dumps   | algorithm.advantages       | 'streamed'
rollout.source=streamed algorithm.name=reinforce++        | rollout.source             | need the whole batch
eval.samples=4 data.held_out=0                            | eval.samples               | nothing is evaluated
eval.samples=4 eval.temperature=0.0                       | eval.temperature           | eval.samples
eval.top_p=0.5                                            | eval.temperature           | eval.top_p
eval.answer=json:dumps                                    | eval.answer                | majority
{SETS},samples=2,temperature=0.0}}]                       | eval.sets[0].temperature   | eval.sets[0].samples
{SETS},reward={{name="exakt-match"}}}}]                   | eval.sets[0].reward.name   | exakt-match
{SETS},samples=4,answer="json:no_such"}}]                 | eval.sets[0].answer        | has no function 'no_such'
{SETS},stop=["\u00e4"]}}]                                 | eval.sets[0].stop          | \u00e4
{SETS},correct_on="right"}}]                              | eval.sets[0].correct_on    | no part of the reward
{SETS}}},{{source="sort-digits",name="a"}}]               | eval.sets[0].name eval.sets[1].name | another one
{SETS}}},{{source="sort-digits",name="b/c"}}]             | eval.sets[1].name          | slash
model.path=/nope                                          | model.config model.path    | /nope
model.path=/nope model.config={{}}                        | model.path                 | no directory
model.config={{}}                                         | model.config               | no model
model.tokenizer=                                          | model.tokenizer            | characters:ABC
model.vocabulary=3                                        | model.vocabulary           | ids up to
model.config.vocab_size=4                                 | model.config.vocab_size    | 4
data.source=nope                                          | data.source                | unknown source
reward.name=exakt-match                                   | reward.name                | exakt-match
reward.functions=[{{name="exact-match"}},{{name="x"}}]    | reward.functions[1].name   | unknown reward
cluster.resources.h200=1                                  | cluster.resources          | needs cluster.address
cluster.secrets=["NOT_SET_X"]                             | cluster.secrets            | not set
cluster.environment={{RAY_X="1"}}                         | cluster.environment        | for Ray
{TURNS} weights.every=2 checkpoint.every=4                | weights.every              | share memory
{TURNS} rollout.source=one-step-off                       | rollout.source             | take turns
backend.name=plian                                        | backend.name               | did you mean 'plain'
backends.plain.no=1                                       | backends.plain.no          | unknown key
backends.fdsp.no=1                                        | backends.fdsp              | did you mean 'fsdp'
engines.fake.no=1                                         | engines.fake.no            | unknown key
extensions=[{{name="jsonl"}},{{name="jsonl"}}]            | extensions                 | share a name
extensions=[{{name="jsonl"}},{{name="corerl:jsonl"}}]     | extensions                 | share a name
extensions=[{{name="jsnol"}}]                             | extensions[0].name         | did you mean 'jsonl'
extensions=[{{name="jsonl",options={{no=1}}}}]            | extensions[0].options.no   | unknown key
train.aux_loss_coef=0.1                                   | train.aux_loss_coef        | no experts
{CRITIC} algorithms.ppo.warmup_steps=4 run.steps=4        | algorithms.ppo.warmup_steps | leaves none of run.steps
{CRITIC} algorithms.ppo.dual_clip=0.5                     | algorithms.ppo.dual_clip   | must be above 1
algorithm.name=reinforce++-baseline rollout.samples=1     | rollout.samples            | at least 2
algorithm.name=distill roles.teacher.ranks=1 {KL}         | algorithm.kl_coef          | got 0.1
algorithm.name=distill roles.teacher={{ranks=1,train={{mini_batches=2}}}} | roles.teacher.train.mini_batches | never
model.config.model_type=nemotron train.layout=packed      | train.layout               | 'auto' or 'whole'
cluster.environment=API_KEY=x                             | cluster.environment        | expected table
cluster.secrets=[API_KEY]                                 | cluster.secrets            | array of strings
weights.transport=ipc cluster.placement=disaggregated cluster.address=h:1 | weights.transport | without actor ranks
backend.name=tests.plan.backends:WITHOUT_LORA lora.rank=2 | roles.actor                | does not support yet
model.vocabulary=15                                       | model.vocabulary           | ids up to 15
{NAMES} engines.transformers.no=1 | backend.name rollout.engine algorithm.name extensions[0].name |
{TABLES} reward.name=exakt-match | engines.fake.no backends.plain.no rollout.saved model.path |
{NAMED} roles.actor.ranks=2 | reward.name data.source algorithm.loss algorithm.advantages train.aux_loss_coef |
""".strip().splitlines()


def refused(tmp_path: Path, overrides: str) -> list[str]:
    """The lines of the error for the sound config with these overrides."""
    with pytest.raises(UserError) as caught:
        make_plan(config_of(DATA, [f"run.dir={tmp_path}/run", *overrides.split()]), starting=False)
    return caught.value.message.splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition("|")[0].strip())
def test_a_config_is_refused_with_the_setting_to_change(row: str, tmp_path: Path) -> None:
    overrides, settings, words = (each.strip() for each in row.format_map(globals()).split("|"))
    lines = refused(tmp_path, overrides)
    assert {re.split(r": | = ", line)[0] for line in lines} == set(settings.split())
    assert all(words in line for line in lines), lines


@pytest.mark.parametrize("mode", ["eval", "rollout-only"])
def test_without_training_a_schedule_of_weights_is_not_refused(mode: str, tmp_path: Path) -> None:
    overrides = f"{TURNS} weights.every=2 checkpoint.every=4 run.mode={mode}".split()
    plan = make_plan(config_of(DATA, [f"run.dir={tmp_path}/run", "data.held_out=4", *overrides]), starting=False)
    assert (plan.run.mode, plan.weights.every) == (mode, 2)
