"""The trained model: what clients ask of it, as calls of a `TrainGroup`, in an order that a group takes.

A wrong call would end the group, and with it what the client has trained. So what is wrong is refused here, before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from corerl import AdamSettings, Engines, Future, Output, Step
from corerl.algorithms import Objective
from corerl.config import ALL_LINEAR, Config, LoraConfig, ModelConfig, dump_toml, recorded
from corerl.engines import SamplingParams, stops_of
from corerl.errors import ConfigError, SaveFailed, UserError
from corerl.models import end_tokens, load_tokenizer
from corerl.types import FloatArray, TrainResult
from corerl_tinker.checkpoints import FOLDERS, Checkpoints, Kind
from corerl_tinker.losses import INFINITE, Rows, rows_of
from corerl_tinker.options import ServeOptions
from corerl_tinker.requests import (
    Adam,
    Draw,
    Drawn,
    InTurn,
    ModelMade,
    ModelWanted,
    Pass,
    PassDone,
    Refused,
    Run,
    Saved,
)
from corerl_tinker.sampling import START, Samplers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

LORA_SNAPSHOTS, SNAPSHOTS = 8, 1
# The linear layers of a decoder by the names that they have in most models, as the API tells them apart.
MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"})
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj"})


def require_servable(options: ServeOptions, *, lora: LoraConfig | None, objective: Objective | None) -> None:
    """Raises ConfigError where the API's sums cannot be computed, or teachers not be held."""
    if options.teachers and lora is not None:
        raise ConfigError(
            "serve.teachers: with a table [lora], ranks hold the weights of one model besides the adapters; remove the "
            "table, or the teachers"
        )
    if objective is None or objective.aggregation != "token-mean":
        raise ConfigError(
            "algorithm.aggregation: the losses of this server are plain sums over tokens, which is 'token-mean' with a "
            "scale of 1; remove the setting"
        )


class ServedPolicy:
    """The `Policy` over one group of ranks and its engines."""

    def __init__(self, engines: Engines, options: ServeOptions, config: Config) -> None:
        """`config` is what the engines were started with. Raises what `require_servable` does."""
        plan = engines.group.plan
        require_servable(options, lora=plan.cluster.lora, objective=plan.objective)
        self._engines, self._options, self._plan = engines, options, plan
        self._model: ModelConfig = plan.assignments[0].config.model
        self._seed: int = config.run.seed
        self._lora: LoraConfig | None = plan.cluster.lora
        self._vocabulary = plan.vocabulary
        self._longest = options.context_length or engines.context_length
        keep = options.snapshots or (SNAPSHOTS if self._lora is None else LORA_SNAPSHOTS)
        self._teachers = {name: -1 - number for number, name in enumerate(options.teachers)}
        sources = {self._teachers[name]: str(Path(path).absolute()) for name, path in options.teachers.items()}
        self._samplers = Samplers(engines, keep=keep, teachers=sources)
        for number in sources:  # before a client is served: ranks end where files do not fit the model
            self._samplers.keep_loaded(number)
        self._checkpoints = Checkpoints(Path(options.directory), dump_toml(recorded(config)))
        self._weights_at: dict[str, int] = {}  # path -> the number of the weights that were saved there
        self._training = ""  # the model's id; "" if there is none
        self._step = 0  # the optimizer step that comes next
        self._gradients = False  # whether passes have left gradients that no step has taken
        self._stale = False  # whether ranks are to begin with the model once more, before they do anything else

    # ---- a model -----------------------------------------------------------------------------------------------------

    def create(self, wanted: ModelWanted, *, model_id: str) -> ModelMade:
        self._require_served(wanted.base_model)
        self._require_same(wanted)
        made = ModelMade(
            base_model=wanted.base_model,
            tokenizer=self._options.name,
            rank=self._lora.rank if self._lora is not None else None,
        )
        try:
            self._checkpoints.begin(model_id, made, wanted.user_metadata)
        except OSError as error:
            raise Refused(f"a model needs its directory in serve.directory: {error}") from error
        self.release()
        if self._step or self._samplers.now != START:
            self._stale = True  # not yet: a checkpoint may be loaded next
        self._training = model_id
        return made

    def release(self) -> None:
        self.discard()
        self._samplers.model_ends()
        self._training = ""

    def _require_served(self, base_model: str) -> None:
        names = (self._options.name, *self._options.aliases)
        if base_model not in names:
            raise Refused(f"base_model={base_model!r} is not served here; {', '.join(map(repr, names))} is")

    def _require_same(self, wanted: ModelWanted) -> None:
        """Raise Refused where this server would train something else than was asked for, and the client would not see
        it. That all weights are trained, and no adapters, is in the answer; adapters of the head are in none."""
        if wanted.optimizer != "adamw":
            raise Refused(f"optimizer {wanted.optimizer!r} is not served here; 'adamw' is")
        if wanted.seed is not None and wanted.seed != self._seed:
            raise Refused(
                f"seed={wanted.seed} of the adapters, but ranks here start with seed {self._seed}; leave it out, or "
                f"start the server with run.seed={wanted.seed}"
            )
        parts = {"train_mlp": (wanted.train_mlp, MLP), "train_attn": (wanted.train_attn, ATTENTION)}
        if self._lora is None:
            for name, (asked, _) in parts.items():
                if not asked:
                    raise Refused(f"{name}=False, but this server trains all weights; give it a table [lora]")
            return
        if wanted.rank is not None and wanted.rank != self._lora.rank:
            raise Refused(
                f"rank={wanted.rank}, but adapters here have rank {self._lora.rank}; ask for that, or start the server "
                f"with lora.rank={wanted.rank}"
            )
        targets = self._lora.targets or (ALL_LINEAR,)
        for name, (asked, layers) in parts.items():
            has = ALL_LINEAR in targets or any(target.rsplit(".", 1)[-1] in layers for target in targets)
            if asked != has:
                raise Refused(
                    f"{name}={asked}, but adapters here are in {', '.join(targets)}; ask for {name}={has}, or start "
                    "the server with other lora.targets"
                )

    def _require_model(self) -> None:
        if not self._training:
            raise Refused("no model is trained here; create one first", status=404)
        self._freshen()

    def _freshen(self) -> None:
        """Let the ranks hold what a new model begins with, if they do not."""
        if self._stale:
            self._restart("", START)

    def _restart(self, directory: str, number: int | None, *, moments: bool = False) -> None:
        """Let other ranks go on from what `save` wrote, the weights of this number, or with the model."""
        self._samplers.turn("train")
        self._gradients, self._stale = False, True
        self._samplers.restarting()
        self._step = self._engines.group.restart(directory, moments=moments).result().optimizer_step
        self._samplers.changed(number)
        self._stale = False

    # ---- training ----------------------------------------------------------------------------------------------------

    def run(self, wanted: Pass) -> PassDone:
        self._require_model()
        rows = rows_of(wanted, vocabulary=self._vocabulary, longest=self._longest)
        if wanted.forward_only:
            self._samplers.turn("forward")
            work = self._passed(self._engines.group.forward, rows.samples, Output.LOGPROBS)
            logprobs = work.result()[Output.LOGPROBS]
            loss = rows.value(logprobs)
        else:
            self._samplers.turn("train")
            logprobs, loss = self._add_gradients(rows)
        return PassDone(logprobs=rows.outputs(logprobs), metrics={"loss:sum": loss})

    def step(self, settings: Adam) -> Mapping[str, float]:
        self._require_model()
        if not self._gradients:
            raise Refused("optim_step without gradients: no forward_backward has come since the last step")
        if not (math.isfinite(settings.lr) and settings.lr >= 0):
            raise Refused(f"learning_rate={settings.lr}; it has to be finite and at least 0")
        self._samplers.turn("train")
        try:
            adam = AdamSettings(
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                clip_norm=settings.clip_norm,
            )
            own = self._plan.train.optimizer
            as_config = adam == AdamSettings(
                betas=own.betas, eps=own.eps, weight_decay=own.weight_decay, clip_norm=own.clip_norm
            )
            result = self._take_step(settings.lr, None if as_config else adam)
        except UserError as error:  # before ranks were called: values, or a backend that has only the config's
            raise Refused(error.message) from error
        if result.applied:
            self._samplers.changed()
        metrics = {name: metric.value for name, metric in result.metrics.items() if name != "loss"}
        return {**metrics, "grad_norm": result.grad_norm, "applied": float(result.applied)}

    def discard(self) -> None:
        if self._gradients:
            # No backend takes a step whose gradients are not finite, and none leaves gradients after one.
            self._samplers.turn("train")
            self._add_gradients(INFINITE)
            self._take_step(0.0)

    def _add_gradients(self, rows: Rows) -> tuple[FloatArray, float]:
        """The log-probs [N], and the loss."""
        group = self._engines.group
        plan, _ = group.plan_part(rows.samples)  # with weights of 1, which leave the step no scale
        work = self._passed(group.forward_backward, rows.samples, plan, rows.loss, outputs=Output.LOGPROBS)
        self._gradients = True
        result = work.result()
        return result.outputs[Output.LOGPROBS], result.metrics["loss"].value

    @staticmethod
    def _passed(verb: Callable[..., Future[T]], *given: Any, **named: Any) -> Future[T]:
        """What the verb of the group starts. Raises Refused for what the backend cannot do, before ranks are called."""
        try:
            return verb(*given, **named)
        except UserError as error:
            raise Refused(error.message) from error

    def _take_step(self, lr: float, adam: AdamSettings | None = None) -> TrainResult:
        step = Step(optimizer_step=self._step, rollout_step=self._step, lr=lr, adam=adam)
        result = self._engines.group.optimizer_step(step).result()
        self._step, self._gradients = self._step + 1, False
        return result

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, name: str, *, ttl: float | None, overwrite: bool, user_metadata: Mapping[str, str]) -> Saved:
        return self._save("training", name, ttl=ttl, overwrite=overwrite, user_metadata=user_metadata)

    def _save(
        self, kind: Kind, name: str, *, ttl: float | None, overwrite: bool, user_metadata: Mapping[str, str]
    ) -> Saved:
        self._require_model()
        if self._gradients:
            raise Refused("forward_backward has left gradients, which no checkpoint holds; save after optim_step")
        path = f"tinker://{self._training}/{FOLDERS[kind]}/{name}"

        def write(directory: Path) -> int:
            step = Step(optimizer_step=self._step, rollout_step=self._step, lr=0.0)
            return self._engines.group.save(str(directory.absolute()), step).result()

        self._samplers.turn("save")
        try:
            saved = self._checkpoints.save(path, write, ttl=ttl, overwrite=overwrite, user_metadata=user_metadata)
        except (SaveFailed, OSError) as error:
            raise Refused(f"{path} was not saved, and the model goes on: {error}") from error
        self._weights_at[path] = self._samplers.now
        return saved

    def load(self, path: str, *, optimizer: bool) -> None:
        if not self._training:
            raise Refused("no model is trained here; create one first", status=404)
        if self._gradients:
            raise Refused("forward_backward has left gradients, which loading would lose; take optim_step first")
        self._go_on_from(path, moments=optimizer)

    def _go_on_from(self, path: str, *, moments: bool = False) -> None:
        state = self._checkpoints.state_of(path).absolute()
        try:
            self._restart(str(state), self._weights_at.get(path), moments=moments)
        except UserError as error:
            self._freshen()
            raise Refused(f"{path} cannot be loaded, and ranks begin with the model again: {error.message}") from error
        self._weights_at[path] = self._samplers.now

    def runs(self) -> Sequence[Run]:
        return self._checkpoints.runs()

    def delete(self, path: str) -> None:
        self._checkpoints.delete(path)

    def expire(self, path: str, *, ttl: float | None) -> None:
        self._checkpoints.expire(path, ttl=ttl)

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def save_for_sampler(
        self, name: str | None, *, ttl: float | None, inflight: bool, user_metadata: Mapping[str, str]
    ) -> tuple[str, Saved | None]:
        self._require_model()
        if name is None:
            if not inflight:
                self._samplers.keep()
            self._samplers.push()
            if inflight:
                return self._samplers.add(None, "the inflight sampler"), None
            return self._samplers.add(self._samplers.now, f"the sampler of step {self._step}"), None
        saved = self._save("sampler", name, ttl=ttl, overwrite=False, user_metadata=user_metadata)
        self._samplers.keep()
        return self._samplers.add(self._samplers.now, saved.path), saved

    def sampler(self, model_path: str | None, base_model: str | None) -> str:
        if model_path is None:
            return self._sampler_of_model(base_model or "")
        self._checkpoints.get(model_path)
        number = self._weights_at.get(model_path)
        if number is None or not self._samplers.has(number):
            if self._training:
                raise Refused(
                    f"the weights of {model_path} are not in memory, and the ranks are training {self._training}; ask "
                    "for this sampler before a model is created, or keep more copies (serve.snapshots)"
                )
            self._go_on_from(model_path)
            number = self._samplers.now
        if number == self._samplers.now and not self._stale:
            self._samplers.keep()
            self._samplers.push()
        return self._samplers.add(number, model_path)

    def _sampler_of_model(self, base_model: str) -> str:
        if base_model in self._teachers:
            return self._samplers.add(self._teachers[base_model], base_model)
        self._require_served(base_model)
        self._stale |= not self._training and self._samplers.now != START
        self._freshen()
        if self._samplers.now == START:
            self._samplers.push()
        return self._samplers.add(START, base_model)

    async def draw(self, wanted: Draw, in_turn: InTurn) -> Drawn:
        if (wanted.prompt < 0).any() or (wanted.prompt >= self._vocabulary).any() or not len(wanted.prompt):
            raise Refused(f"the prompt needs at least one token, and all below {self._vocabulary}")
        if wanted.prompt_top > self._vocabulary:
            raise Refused(f"topk_prompt_logprobs={wanted.prompt_top}, of {self._vocabulary} tokens that there are")
        return await self._samplers.draw(wanted, self._params(wanted), in_turn)

    def _params(self, wanted: Draw) -> SamplingParams:
        room = (self._longest or len(wanted.prompt) + self._plan.max_tokens) - len(wanted.prompt)
        most = room if wanted.max_tokens is None else wanted.max_tokens
        if (self._longest and most > room) or most < 1:
            raise Refused(
                f"a prompt of {len(wanted.prompt)} tokens and {most} more do not fit in the context length "
                f"{self._longest}; shorten the prompt, or ask for fewer max_tokens"
            )
        stops, texts = list(wanted.stop_tokens or ()), list(wanted.stop_texts)
        try:
            if texts:
                tokens, texts = stops_of(texts, self._tokenizer)
                stops += tokens
        except ValueError as error:
            raise Refused(f"stop: {error}") from None
        if wanted.stop_tokens is None:
            stops += self._ends
        return SamplingParams(
            temperature=wanted.temperature or 1.0,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            max_tokens=most,
            stop_tokens=tuple(dict.fromkeys(stops)),
            stop=tuple(texts),
            greedy=wanted.temperature == 0.0,
        )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(tokenizer=self._model.tokenizer, path=self._model.path)

    @cached_property
    def _ends(self) -> list[int]:
        return end_tokens(self._tokenizer, self._model)
