"""The tables of prompts, rewards, sampling and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from attrs import field, fields, frozen
from attrs.validators import optional

from corerl.config.options import (
    MOST,
    above,
    at_least,
    between,
    finite,
    finite_values,
    fraction,
    option,
    zero_or_several,
)

MOST_SAMPLES = 2**20  # of a step, which the driver holds at once: more are a slip of the hand


@frozen(kw_only=True)
class DataSource:
    """One of several sources of prompts."""

    source: str = option("source of prompts, as in data.source")
    name: str = option("name in `Prompt.source` and in metrics; empty uses the file's name", default="")
    weight: float = option(
        "share of the prompts, relative to the other sources", default=1.0, validator=[above(0), finite]
    )
    prompt_key: str = option("field that holds the prompt; empty uses data.prompt_key", default="")
    answer_key: str = option("field that holds the answer; empty uses data.answer_key", default="")
    split: str = option("its split, if it is a directory of several; empty uses data.split", default="")
    subset: str = option("its subset, if it has several; empty uses data.subset", default="")
    system: str | None = option(
        "the system message of its chats that have none; '' gives them none, unset uses data.system",
        default=None,
    )

    @property
    def called(self) -> str:
        return self.name or PurePath(self.source).stem


@frozen(kw_only=True)
class DataConfig:
    """The prompts of a run."""

    source: str = option(
        "a generated task (sort-digits), a .jsonl file, a .parquet, .csv, .arrow or .json file, a pattern such as "
        "'data/*.jsonl', a directory of such files, or a directory saved by the `datasets` library",
        default="sort-digits",
    )
    split: str = option("the split of a directory that is read; empty: train", default="")
    subset: str = option("the subset of a directory whose README.md names several; empty: its default", default="")
    sources: tuple[DataSource, ...] = option("alternative to source: several sources, mixed by weight", default=())
    prompt_key: str = option("field that holds the prompt: a string, or a list of messages", default="prompt")
    answer_key: str = option("field that holds the answer; may be missing", default="answer")
    chat: bool = option("wrap string prompts as a user message in the tokenizer's chat template", default=False)
    system: str = option("the system message of chats that have none", default="")
    tools_key: str = option(
        "field that holds a chat's tools for the chat template, as in OpenAI's `tools`; may be missing; empty: none",
        default="tools",
    )
    chat_template_options: Mapping[str, Any] = option(
        "arguments of the tokenizer's own chat template, such as {enable_thinking = false}", factory=dict
    )
    refused: Literal["fail", "skip"] = option(
        "rows that cannot be shown to the model, such as those with pictures, without a prompt, or with a chat that "
        "the chat template refuses; fail: an error names the first one; skip: they are left out and counted",
        default="fail",
    )
    ignore: tuple[str, ...] = option(
        "fields that the model need not be shown, such as pictures that only the reward reads; rows that have them are "
        "not refused",
        default=(),
    )
    held_out: int = option(
        "prompts of each source held out for evaluation and never trained on", default=256, validator=at_least(0)
    )
    restart: bool = option(
        "on resume with other rows than the checkpoint's (not only more): start at their first prompt, while "
        "weights, optimizer and step continue; unset, that is an error",
        default=False,
    )


@frozen(kw_only=True)
class RewardFunction:
    """One of several reward functions, whose weighted sum is the reward."""

    name: str = option("a built-in reward, or 'module:function'")
    label: str = option("its name in metrics; empty uses the function's name", default="")
    weight: float = option("factor of its value in the reward", default=1.0, validator=finite)
    options: Mapping[str, Any] = option("keyword arguments of the function", factory=dict)
    weights: Mapping[str, float] = option(
        "if it returns several values by name: the weight of each in its sum; empty: 1 each",
        factory=dict,
        validator=finite_values,
    )


@frozen(kw_only=True)
class RewardConfig:
    """How samples are scored."""

    name: str = option("a built-in reward, or 'module:function'", default="position-match")
    options: Mapping[str, Any] = option("keyword arguments of the reward function", factory=dict)
    weights: Mapping[str, float] = option(
        "if the function returns several values by name: the weight of each in the reward, their sum; empty: 1 each",
        factory=dict,
        validator=finite_values,
    )
    functions: tuple[RewardFunction, ...] = option(
        "alternative to name: several functions, whose weighted sum is the reward", default=()
    )
    special_tokens: bool = option(
        "keep special tokens in the text that is scored, such as a <think> that the tokenizer declares special; the "
        "token that ended the sample is always left out",
        default=False,
    )
    processes: int = option(
        "processes that score samples in parallel; 0 scores them in the driver, without a time limit",
        default=2,
        validator=between(0, 1024),
    )
    timeout: float = option("time limit for one sample, in seconds", default=30.0, validator=[above(0), finite])
    failed_value: float = option(
        "reward of a sample whose reward function raises, returns no finite number, times out or ends its process",
        default=0.0,
        validator=between(-1e9, 1e9),
    )


@frozen(kw_only=True)
class RolloutConfig:
    """How prompts become samples."""

    engine: str = option("an installed rollout engine", default="transformers")
    sampler: str = option(
        "an installed sampler, which turns prompts into samples; prompts: each sample is one response",
        default="prompts",
    )
    replicas: int = option("number of engines; they share the prompts", default=1, validator=between(1, MOST))
    restarts: int = option(
        "restarts in a row, without a completed step, of an engine that died, failed or was killed by Ray for lack"
        " of memory",
        default=3,
        validator=at_least(0),
    )
    prompts: int = option("prompts per rollout step", default=64, validator=between(1, MOST_SAMPLES))
    samples: int = option("samples per prompt (the group size)", default=8, validator=between(1, MOST_SAMPLES))
    temperature: float = option("sampling temperature; divides the logits", default=1.0, validator=[above(0), finite])
    top_p: float = option(
        "sample only from the likeliest tokens that together have this probability", default=1.0, validator=fraction
    )
    top_k: int = option(
        "sample only from so many of the likeliest tokens, or from those of top_p where these are fewer; 0: from all",
        default=0,
        validator=zero_or_several,
    )
    max_tokens: int = option(
        "maximum new tokens per sample, in an episode all tokens of a conversation after its first request; a sample "
        "cut off there is marked truncated",
        default=256,
        validator=at_least(1),
    )
    context_length: int = option(
        "maximum tokens of prompt and response together; prompts that leave no room for max_tokens are skipped; 0 "
        "uses the model's max_position_embeddings",
        default=0,
        validator=at_least(0),
    )
    stop: tuple[str, ...] = option(
        "texts that end a sample, besides the end tokens that the tokenizer, config.json and generation_config.json "
        "name; a sample keeps all tokens up to the one that completes the text, and the text is scored without it",
        default=(),
    )
    source: Literal["synchronous", "streamed", "one-step-off", "asynchronous"] = option(
        "when engines sample; synchronous: while nothing trains; streamed: the same samples, but training begins with "
        "the prompts that are scored while others are sampled; one-step-off: each batch while the previous one "
        "trains; asynchronous: all the time, paused for weight updates and continued with the new weights",
        default="synchronous",
        needs="run.mode=train|eval",
    )
    max_staleness: int = option(
        "asynchronous: weight updates by which a sample's oldest token may lag behind the trainer; older samples are "
        "dropped and their prompts resampled",
        default=1,
        validator=at_least(1),
        needs="rollout.source=asynchronous",
    )
    postprocess: str = option(
        "'module:function' that maps a scored batch to another before advantages are computed",
        default="",
        needs="!rollout.source=streamed",
    )
    save: bool = option("save every batch under run.dir/rollouts; rollout-only always does", default=False)
    saved: str = option(
        "train-only: directory of saved batches to train from",
        default="",
        needs="run.mode=train-only",
    )


@frozen(kw_only=True, slots=False)  # EvalSource has two bases
class EvalSampling:
    """How held-out prompts are sampled, and which answers are right. What a set leaves unset is as in [eval]."""

    samples: int | None = option(
        "samples of each prompt; with several, pass@k and majority@k are reported; unset: 1",
        default=None,
        validator=optional(between(1, MOST_SAMPLES)),
    )
    temperature: float | None = option(
        "sampling temperature, 0 takes the likeliest token; unset: 0 with one sample, with several as in [rollout]",
        default=None,
        validator=[at_least(0), optional(finite)],
    )
    top_p: float | None = option("unset: rollout.top_p", default=None, validator=optional(fraction))
    top_k: int | None = option("unset: rollout.top_k", default=None, validator=optional(zero_or_several))
    max_tokens: int | None = option(
        "prompts that leave no room for so many tokens are skipped; unset: rollout.max_tokens",
        default=None,
        validator=at_least(1),
    )
    stop: tuple[str, ...] | None = option("unset: rollout.stop", default=None)
    correct_on: str | None = option(
        "the part of the reward that says whether an answer is right, as in algorithm.dynamic_sampling_on; unset: the "
        "reward itself",
        default=None,
    )
    correct_from: float | None = option(
        "its value from which on an answer is right; unset: 1", default=None, validator=optional(finite)
    )
    answer: str | None = option(
        "'module:function' called with (prompt, response) that returns the answer for majority@k, or None if there is "
        "none; unset: the response without surrounding white space",
        default=None,
    )

    def settled(self, common: EvalSampling, rollout: RolloutConfig) -> EvalSampling:
        """These with a value for what is unset: of `common`, or of `rollout`."""
        names = [each.name for each in fields(EvalSampling)]
        given = {name: each for table in (common, self) for name in names if (each := getattr(table, name)) is not None}
        unset = {name: getattr(rollout, name) for name in ("top_p", "top_k", "max_tokens", "stop", "temperature")}
        if given.get("samples", 1) == 1:
            unset["temperature"] = 0.0
        return EvalSampling(**{"samples": 1, **unset, **given})


@frozen(kw_only=True)
class EvalSource(DataSource, EvalSampling):
    """One of several sets of held-out prompts: all that a source has."""

    weight: float = field(default=1.0, init=False)  # nothing is mixed
    reward: RewardConfig | None = option(
        "[reward] settings of this set only, replacing [reward] entirely; unset uses [reward]", default=None
    )
    every: int | None = option("unset: eval.every", default=None, validator=at_least(0))


@frozen(kw_only=True)
class EvalConfig(EvalSampling):
    """Evaluation on held-out prompts."""

    every: int = option(
        "rollout steps between evaluations on held-out prompts; 0 disables them", default=25, validator=at_least(0)
    )
    at_start: bool = option("also evaluate before the first step", default=True)
    sets: tuple[EvalSource, ...] = option("further sets of held-out prompts, besides data.held_out", default=())

    @property
    def tables(self) -> dict[str, EvalSampling]:
        """The settings of `data.held_out` and of each set, by path in the config."""
        return {"eval": self, **{f"eval.sets[{number}]": each for number, each in enumerate(self.sets)}}
