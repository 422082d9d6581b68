"""Which checks of the conformance suite run at night alone, by the names of checks, tests and variants."""

from __future__ import annotations

import pytest

from corerl_testing.marks import MARK
from corerl_testing.outcomes import FOUNDATION, parameters_of

# What runs with each variant every day, besides FOUNDATION: a resumed run, and sleep, which is each rank's own and as
# on two ranks where a variant has more.
RESUME, SLEEP = "C18", "C43"
OF_VARIANTS = {RESUME, SLEEP}
# Variants of DeepSpeed that its test_options.py resumes to the last bit, with weights in bfloat16.
RESUMED_IN_HALF = {"stage 1", "stage 2, moments on the host", "parameters on the host"}
# How a group ends, what the processes of ranks get, how engines are sent weights under Ray (what each backend sends is
# C21), how a save is committed, the states in which a verb is refused, versions of weights, engines that fail in an
# update: all of it core's, which one backend of several ranks shows.
OF_CORE = {"C19", "C22", "C23", "C28", "C36", "C37", "C38", "C39", "C40", "C47"}
# What a model computes, which DeepSpeed has from core as FSDP does, and what core does with its tower and adapters.
# Each part of a model is trained with DeepSpeed too, by a check that is not among these.
OF_MODELS = {
    "test_a_balancing_loss_has_the_gradients_of_transformers",
    "test_a_critic_is_shown_pictures_too",
    "test_a_critic_trains_on_samples_that_begin_alike",
    "test_a_head_that_the_model_has_is_loaded",
    "test_a_step_without_pictures_leaves_a_tower_as_it_is",
    "test_a_tower_takes_a_steps_own_settings_too",
    "test_adapters_of_experts_train_as_the_plain_backends",
    "test_checkpoints_hold_a_tower_only_if_it_is_trained",
    "test_engines_are_sent_experts_with_the_adapters_merged",
    "test_experts_are_reported_as_chosen_and_replayed_as_given",
    "test_logprobs_are_those_of_the_targets_in_the_batch",
    "test_long_sequences_in_bfloat16_do_not_see_each_other",
    "test_long_sequences_of_a_critic_do_not_see_each_other",
    "test_random_critics_do_not_depend_on_the_number_of_ranks",
    "test_samples_that_begin_alike_get_their_own_outputs",
    "test_samples_that_begin_alike_train_as_they_do_apart",
    "test_steps_on_several_targets_of_each_token_follow_the_plain_backend",
    "test_value_heads_start_by_name_and_replace_language_heads",
    "test_values_are_the_head_times_what_transformers_gives",
}


def is_seen_elsewhere(item: pytest.Item) -> bool:
    """Whether a check runs on fewer ranks than its most, with a variant that trains, sleeps and resumes as well, or of
    another backend than FSDP sees what core does, or its models."""
    if (mark := item.get_closest_marker(MARK)) is None or mark.args[0].id == FOUNDATION:
        return False
    if mark.args[0].id in OF_CORE and "plugins/fsdp/" not in item.nodeid:
        return True
    if "plugins/deepspeed/" in item.nodeid and getattr(item, "originalname", "") in OF_MODELS:
        return True
    parameters = parameters_of(item)
    if (variant := parameters.get("backend_variant")) is not None:
        if mark.args[0].id == RESUME and "plugins/deepspeed/" in item.nodeid and variant.name in RESUMED_IN_HALF:
            return True
        return mark.args[0].id not in OF_VARIANTS or (mark.args[0].id == SLEEP and variant.ranks > 2)
    return parameters.get("world_size", 0) < max(mark.args[0].ranks) and "world_size" in parameters
