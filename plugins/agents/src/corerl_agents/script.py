"""Try a rollout function without a run: a policy that gives scripted answers, in an episode like those of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from attrs import evolve, field, frozen
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.config import ModelConfig, RolloutConfig
from corerl.data import Prompt
from corerl.engines import UNLIMITED, GenerateRequest, Generation, Stops
from corerl.errors import ModelError
from corerl.models import context_length, end_tokens, hf_config, load_tokenizer
from corerl.rollout import EventLoop, sampling_params
from corerl_agents.chat_requests import ChatRequest
from corerl_agents.chat_server import ChatServer
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import Episode, EpisodeFunction
from corerl_agents.histories import Turn
from corerl_agents.refused import Refused
from corerl_agents.runner import EpisodeRunner, EpisodeState
from corerl_agents.sampler import keys_of
from corerl_agents.texts import FollowingTexts

END = "<|end|>"
# Teaches the format that `samplers.episodes.tool_calls = "auto"` finds in it.
TEMPLATE = (
    '{% if tools %}tools: {{ tools | tojson }}, called by <tool_call>{"name": ..., "arguments": {...}}</tool_call>\n'
    "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    f"{END}\n{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
)
LONG = RolloutConfig(max_tokens=2**20)


@frozen(kw_only=True)
class Scripted:
    """An episode to pass to a rollout function, and what became of it."""

    episode: Episode
    tokenizer: PreTrainedTokenizerBase
    _states: Sequence[EpisodeState]
    _asked: list[tuple[EpisodeState, ChatRequest]] = field(factory=list)  # what was not refused

    def role(self, name: str) -> Scripted:
        """What is said of one of `samplers.episodes.roles` alone."""
        own = [state for state in self._states if state.role == name]
        return evolve(self, episode=self.episode.role(name), states=own)

    @property
    def requests(self) -> list[ChatRequest]:
        """Those of the function that were not refused."""
        return [chat for state, chat in self._asked if state in self._states]

    @property
    def text(self) -> str:
        """What the reward gets where the function returns None: the last answer so far, of the first role if there are
        several."""
        return next((row.text for row in self._states[0].rows if row.final), "")

    @property
    def rows(self) -> list[list[tuple[str, bool]]]:
        """What each row of the episode would be so far: its texts with special tokens, and whether they are trained
        on."""
        rows = []
        for row in (row for state in self._states for row in state.rows):
            edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
            parts = zip(np.split(row.tokens, edges), np.split(row.loss_mask, edges), strict=True)
            rows.append([(str(self.tokenizer.decode(tokens)), bool(mask[0])) for tokens, mask in parts])
        return rows

    @property
    def asked(self) -> list[list[str]]:
        """The message texts of each request."""
        return [[str(message.get("content") or "") for message in request.messages] for request in self.requests]


@contextmanager
def scripted(
    prompt: Prompt,
    answers: Sequence[str],
    *,
    model: ModelConfig | None = None,
    rollout: RolloutConfig = LONG,
    options: EpisodesConfig | None = None,
    template_options: Mapping[str, Any] | None = None,
    special_tokens: bool = False,
) -> Iterator[Scripted]:
    """Give `answers` one after the other, as a policy that is certain of them: every log-prob is 0. All else is as in
    a run, whose code this is: what is refused, where answers end or are cut, tool calls, tokens and usage.

    `model` has the tokenizer and the end tokens; without it there is one token per byte. `rollout` has the limits and
    the sampling; its default limits nothing. `options` are those of `[samplers.episodes]`, such as
    `tool_calls`; `template_options` are those of `data`, `special_tokens` is `reward`'s.

    Raises ModelError and ConfigError as a run does.
    """
    tokenizer = load_tokenizer(tokenizer=model.tokenizer, path=model.path) if model else byte_tokenizer()
    params = sampling_params(rollout, tokenizer, end_tokens(tokenizer, model or ModelConfig()))
    if not params.stop_tokens:
        raise ModelError("the model has no end token, so none of the answers could end; set eos_token in its tokenizer")
    longest = 0 if rollout is LONG else rollout.context_length or _positions(model)
    handed: Future[Episode] = Future()
    over = threading.Event()

    def play(episode: Episode) -> None:  # the caller plays; this lasts as long
        handed.set_result(episode)
        over.wait()

    options = options or EpisodesConfig()
    states = [
        EpisodeState(number=0, prompt=prompt, key=key, role=role) for role, key in keys_of(0, options.roles).items()
    ]
    asked: list[tuple[EpisodeState, ChatRequest]] = []
    begun: list[Turn] = []

    async def policy(request: GenerateRequest) -> Generation:
        state, turn = next((state, turn) for state in states for turn in state.turns if _is_of(request, turn))
        if turn not in begun:
            begun.append(turn)
            asked.append((state, turn.chat))
        if len(begun) > len(answers):
            raise Refused(f"the script has only {len(answers)} answers, but one more was requested")
        return _generated(answers[begun.index(turn)], request, tokenizer)

    with (
        closing(EventLoop("script")) as loop,
        closing(ChatServer(loop, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)) as server,
    ):
        runner = EpisodeRunner(
            server=server,
            tokenizer=tokenizer,
            params=params,
            function=EpisodeFunction(name="the script", function=play),
            config=options,
            longest_prompt=longest - rollout.max_tokens if longest else UNLIMITED,
            template_options=template_options,
            special_tokens=special_tokens,
        )
        playing = loop.begin(runner.play([states], policy))
        try:
            yield Scripted(episode=handed.result(), tokenizer=tokenizer, states=states, asked=asked)
        finally:
            over.set()
            playing.result()


def _positions(model: ModelConfig | None) -> int:
    """Maximum tokens of a sequence by the model's own config; 0 if it is not known."""
    if model is None or not (model.config or (Path(model.path) / "config.json").is_file()):
        return 0
    return context_length(hf_config(model)) or 0


def _is_of(request: GenerateRequest, turn: Turn) -> bool:
    """Whether this requests the turn's answer, or a part of it."""
    asked = turn.request
    before = request.tokens[: len(request.tokens) - int(request.answered[0])]
    return bool(request.noise_keys[0] == asked.noise_keys[0]) and np.array_equal(before, asked.tokens)


def _generated(text: str, request: GenerateRequest, tokenizer: PreTrainedTokenizerBase) -> Generation:
    """The text and an end token, or what is left of them, as an engine would sample them for this request of a row."""
    ends = request.params.stop_tokens
    tokens = [*FollowingTexts(tokenizer).encode(text), ends[0]]
    tokens = tokens[: 1 + next(at for at, token in enumerate(tokens) if token in ends)]
    tokens = tokens[int(request.answered[0]) : Stops(tokenizer, request.params.stop).end(tokens)]
    left = int(request.left[0])
    cut = np.array(tokens[:left], dtype=np.int64)
    return Generation(
        tokens=cut,
        offsets=np.array([0, len(cut)]),
        logprobs=np.zeros(len(cut), dtype=np.float32),
        versions=np.zeros(len(cut), dtype=np.int64),
        truncated=np.array([len(tokens) > left]),
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then `END`; its chat template takes any roles, and tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, clean_up_tokenization_spaces=False)
    made.chat_template = TEMPLATE
    return made
