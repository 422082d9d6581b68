"""The trained model: what clients ask of it, as calls of a `TrainGroup`, in an order that a group takes.

A wrong call would end the group, and with it what the client has trained. So what is wrong is refused here, before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types as sdk

from corerl import AdamSettings, Engines, LossSpec, Output, SampleBatch, Step
from corerl.algorithms import Objective
from corerl.config import ALL_LINEAR, EXPERTS, Config, LoraConfig, dump_toml, recorded
from corerl.engines import GenerateRequest, Generation, SamplingParams, stops_of
from corerl.errors import ConfigError, SaveFailed, UserError
from corerl.models import end_tokens, load_tokenizer
from corerl.ops import hash_key
from corerl.types import FloatArray, TrainResult, offsets_of
from corerl_tinker.checkpoints import Checkpoints
from corerl_tinker.losses import INFINITE, Rows, rows_of
from corerl_tinker.options import ServeOptions
from corerl_tinker.requests import InTurn, Pass, Refused, Sampler
from corerl_tinker.sampling import START, Samplers

LORA_SNAPSHOTS, SNAPSHOTS = 8, 1
# The linear layers of a decoder by the names that they have in most models, as the API tells them apart.
PARTS: Mapping[str, frozenset[str]] = {
    "train_mlp": frozenset({ALL_LINEAR, EXPERTS, "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"}),
    "train_attn": frozenset({ALL_LINEAR, "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj"}),
}

SETTINGS = {"seed": "run.seed", "rank": "lora.rank"}


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
    """The trained model and what samples from it, over one group of ranks and its engines.

    One thread calls all but `planned`, `rows` and `draw`, in the order of the client's numbers, and trains no model
    that is not created. Each method raises `Refused`, or another UserError, for what has failed alone, such as what the
    client should do otherwise; other errors end the model.
    """

    def __init__(self, engines: Engines, options: ServeOptions, config: Config) -> None:
        """`config` is what the engines were started with. Raises what `require_servable` does."""
        plan = engines.group.role_plan
        require_servable(options, lora=plan.cluster.lora, objective=plan.objective)
        self._engines, self._options, self._plan = engines, options, plan
        model = plan.assignments[0].config.model
        self._tokenizer = load_tokenizer(tokenizer=model.tokenizer, path=model.path)
        self._ends = end_tokens(self._tokenizer, model)
        self._seed: int = config.run.seed
        self._lora: LoraConfig | None = plan.cluster.lora
        self._rank = self._lora.rank if self._lora is not None else None  # None: all weights are trained
        self.context_length = engines.context_length  # the most tokens of a row; 0: unlimited
        keep = options.snapshots or (SNAPSHOTS if self._rank is None else LORA_SNAPSHOTS)
        self._teachers = {name: -1 - number for number, name in enumerate(options.teachers)}
        sources = {self._teachers[name]: str(Path(path).absolute()) for name, path in options.teachers.items()}
        self._samplers = Samplers(engines, keep=keep, teachers=sources)
        for number in sources:  # before a client is served: ranks end where files do not fit the model
            self._samplers.keep(number)
        # Of files alone, so that any thread may ask it while the group computes.
        self.checkpoints = Checkpoints(Path(options.directory), dump_toml(recorded(config)))
        self._weights_at: dict[str, int] = {}  # path -> the number of the weights that were saved there
        self._training = ""  # the model's id; "" if there is none
        self._name = options.name  # by which the client calls the model
        self._step = 0  # the optimizer step that comes next
        self._gradients = False  # whether passes have left gradients that no step has taken

    @property
    def ended(self) -> bool:
        """Whether the ranks have ended."""
        return self._engines.group.processes.ended

    # ---- a model -----------------------------------------------------------------------------------------------------

    def planned(self, wanted: sdk.CreateModelRequest, *, model_id: str, path: str = "") -> sdk.TrainingRun:
        """The model that `create` begins with, from a checkpoint if there is a path; in any thread."""
        self._require_served(wanted.base_model)
        if (optimizer := wanted.optimizer_config.type) != "adamw":
            raise Refused(f"optimizer {optimizer!r} is not served here; 'adamw' is")
        if wanted.lora_config is not None:
            self._require_same(wanted.lora_config)
        if path:
            self._require_loadable(path)
        run = sdk.TrainingRun(
            training_run_id=model_id,
            base_model=wanted.base_model,
            model_owner="local",
            is_lora=self._rank is not None,
            lora_rank=self._rank,
            last_request_time=datetime.now(UTC),
            user_metadata={name: str(value) for name, value in (wanted.user_metadata or {}).items()},
        )
        try:
            self.checkpoints.begin(run)
        except OSError as error:
            raise Refused(f"a model needs its directory in serve.directory: {error}") from error
        return run

    def create(self, run: sdk.TrainingRun, path: str = "", *, optimizer: bool = False) -> None:
        """Begin with a model that was planned, in the place of the one before."""
        self.release()
        if path:
            self._go_on_from(path, moments=optimizer)
        elif self._step or self._samplers.now != START:
            self._restart("", START)
        self._training, self._name = run.training_run_id, run.base_model

    def release(self) -> None:
        """The client has gone or has created another model: what no checkpoint has is given up. Samplers stay."""
        self.discard()
        self._training = ""

    def _require_served(self, base_model: str) -> None:
        names = (self._options.name, *self._options.aliases)
        if base_model not in names:
            raise Refused(f"base_model={base_model!r} is not served here; {', '.join(map(repr, names))} is")

    def _require_same(self, asked: sdk.LoraConfig) -> None:
        """Raise Refused where this server would train something else than was asked for, and the client would not see
        it. That all weights are trained, and no adapters, is in the answer; adapters of the head are in none."""
        here: dict[str, Any] = {"seed": self._seed}
        if self._lora is not None:
            layers = {target.rsplit(".", 1)[-1] for target in self._lora.targets or (ALL_LINEAR,)}
            parts = {name: bool(layers & known) for name, known in PARTS.items()}
            here |= {"rank": self._rank, **parts}
        for name, value in here.items():
            if getattr(asked, name) not in (value, None, 0 if name == "rank" else None):
                raise Refused(
                    f"{name}={getattr(asked, name)}, but adapters here have {name} {value}; ask for that, or start the "
                    f"server with another {SETTINGS.get(name, 'lora.targets')}"
                )
        if self._lora is None and not (asked.train_mlp and asked.train_attn):
            raise Refused("this server trains all weights, and not some layers alone; give it a table [lora]")

    def _restart(self, directory: str, number: int | None, *, moments: bool = False) -> None:
        """Let other ranks go on from what `save` wrote, the weights of this number, or with the model."""
        self._samplers.turn("train")
        self._gradients = False
        self._samplers.restarting()
        self._step = self._engines.group.restart(directory, moments=moments).result().optimizer_step
        self._samplers.changed(number)

    # ---- training ----------------------------------------------------------------------------------------------------

    def rows(self, wanted: Pass) -> Rows:
        """The rows of a pass; in any thread."""
        return rows_of(wanted, vocabulary=self._plan.vocabulary, longest=self.context_length)

    def run(self, passes: Sequence[Rows]) -> list[FloatArray]:
        """Compute log-probs, [N] or [N, K] of each, and add gradients unless they are `forward_only`, for passes that
        have the same `key`."""
        samples = SampleBatch.concatenate([each.samples for each in passes])
        if passes[0].forward_only:
            self._samplers.turn("forward")
            logprobs = self._engines.group.forward(samples, Output.LOGPROBS).result()[Output.LOGPROBS]
        else:
            logprobs = self._add_gradients(samples, passes[0].loss)
        return np.split(logprobs, offsets_of([len(each.samples.tokens) for each in passes])[1:-1])

    def step(self, asked: sdk.AdamParams) -> Mapping[str, float]:
        """Metrics of the step, such as the gradient norm."""
        if not self._gradients:
            raise Refused("optim_step without gradients: no forward_backward has come since the last step")
        if not (math.isfinite(asked.learning_rate) and asked.learning_rate >= 0):
            raise Refused(f"learning_rate={asked.learning_rate}; it has to be finite and at least 0")
        adam: AdamSettings | None = AdamSettings(
            betas=(asked.beta1, asked.beta2),
            eps=asked.eps,
            weight_decay=asked.weight_decay,
            clip_norm=asked.grad_clip_norm,
        )
        own = self._plan.train.optimizer
        if adam == AdamSettings(betas=own.betas, eps=own.eps, weight_decay=own.weight_decay, clip_norm=own.clip_norm):
            adam = None  # for a backend that has only the config's
        result = self._take_step(asked.learning_rate, adam)
        if result.applied:
            self._samplers.changed()
        metrics = {name: metric.value for name, metric in result.metrics.items() if name != "loss"}
        return {**metrics, "grad_norm": result.grad_norm, "applied": float(result.applied)}

    def discard(self) -> None:
        """Drop the gradients that no step has taken."""
        if self._gradients:
            # No backend takes a step whose gradients are not finite, and none leaves gradients after one.
            self._add_gradients(*INFINITE)
            self._take_step(0.0)

    def _add_gradients(self, samples: SampleBatch, loss: LossSpec) -> FloatArray:
        """Returns the log-probs, [N] or [N, K]."""
        self._samplers.turn("train")
        group = self._engines.group
        plan, _ = group.plan_part(samples)  # with weights of 1, which leave the step no scale
        work = group.forward_backward(samples, plan, loss, outputs=Output.LOGPROBS)
        self._gradients = True
        return work.result().outputs[Output.LOGPROBS]

    def _take_step(self, lr: float, adam: AdamSettings | None = None) -> TrainResult:
        self._samplers.turn("train")
        step = Step(optimizer_step=self._step, rollout_step=self._step, lr=lr, adam=adam)
        result = self._engines.group.optimizer_step(step).result()
        self._step, self._gradients = self._step + 1, False
        return result

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, asked: sdk.SaveWeightsRequest | sdk.SaveWeightsForSamplerRequest) -> sdk.Checkpoint:
        """Weights and moments, as `tinker://RUN/weights/NAME` or `tinker://RUN/sampler_weights/NAME`."""
        kind, overwrite = "sampler_weights", False
        if isinstance(asked, sdk.SaveWeightsRequest):
            kind, overwrite = "weights", asked.overwrite
        if self._gradients:
            raise Refused("forward_backward has left gradients, which no checkpoint holds; save after optim_step")
        path = f"tinker://{self._training}/{kind}/{asked.path or ''}"

        def write(directory: Path) -> int:
            step = Step(optimizer_step=self._step, rollout_step=self._step, lr=0.0)
            return self._engines.group.save(str(directory.absolute()), step).result()

        self._samplers.turn("save")
        try:
            saved = self.checkpoints.save(
                path, write, ttl=asked.ttl_seconds, overwrite=overwrite, user_metadata=asked.user_metadata
            )
        except (SaveFailed, OSError) as error:
            raise Refused(f"{path} was not saved, and the model goes on: {error}") from error
        self._weights_at[path] = self._samplers.now
        return saved

    def load(self, path: str, *, optimizer: bool) -> None:
        """Into the model that was created, with the moments of a training checkpoint or without."""
        if self._gradients:
            raise Refused("forward_backward has left gradients, which loading would lose; take optim_step first")
        self._go_on_from(path, moments=optimizer)

    def _require_loadable(self, path: str) -> None:
        run, _ = self.checkpoints.find(path)
        if run.lora_rank != self._rank:
            ranks = (run.lora_rank, self._rank)
            there, here = ("all weights" if each is None else f"adapters of rank {each}" for each in ranks)
            raise Refused(f"{path} has {there}, and this server trains {here}; start one with the same [lora]")

    def _go_on_from(self, path: str, *, moments: bool = False) -> None:
        self._require_loadable(path)
        try:
            self._restart(str(self.checkpoints.state_of(path)), self._weights_at.get(path), moments=moments)
        except UserError as error:
            self._restart("", START)
            raise Refused(f"{path} cannot be loaded, and ranks begin with the model again: {error.message}") from error
        self._weights_at[path] = self._samplers.now

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def save_for_sampler(self, asked: sdk.SaveWeightsForSamplerRequest) -> Sampler:
        """A new sampler of the weights as they are, and their checkpoint if it has a name."""
        if asked.kind != "snapshot":
            raise Refused(f"kind={asked.kind!r} is not served: what a sampler answers with never changes; leave it out")
        path = None if asked.path is None else self.save(asked).tinker_path
        self._samplers.keep()
        if path is None:
            self._samplers.push()
        name = path or f"the sampler of step {self._step}"
        return self._samplers.add(self._samplers.now, name, base_model=self._name, model_path=path)

    def sampler(self, model_path: str | None, base_model: str) -> Sampler:
        """A new sampler of a saved checkpoint, or of a base model."""
        if model_path is None:
            return self._samplers.add(self._weights_of_model(base_model), base_model, base_model=base_model)
        run, _ = self.checkpoints.find(model_path)
        number = self._weights_at.get(model_path)
        if number is None or not self._samplers.has(number):
            if self._training:
                raise Refused(
                    f"the weights of {model_path} are not in memory, and the ranks are training {self._training}; ask "
                    "for this sampler before a model is created, or keep more copies (serve.snapshots)"
                )
            self._go_on_from(model_path)
            number = self._samplers.now
        if number == self._samplers.now:
            self._samplers.keep()
            self._samplers.push()
        return self._samplers.add(number, model_path, base_model=run.base_model, model_path=model_path)

    def _weights_of_model(self, base_model: str) -> int:
        if base_model in self._teachers:
            return self._teachers[base_model]
        self._require_served(base_model)
        if not self._training and self._samplers.now != START:
            self._restart("", START)
        if self._samplers.now == START:
            self._samplers.push()
        return START

    async def draw(self, sampler: Sampler, wanted: sdk.SampleRequest, in_turn: InTurn) -> Generation:
        """In the server's event loop. What ranks compute for it, such as log-probs of the prompt, waits its turn."""
        return await self._samplers.draw(sampler, wanted, self._request(sampler, wanted), in_turn)

    def _request(self, sampler: Sampler, wanted: sdk.SampleRequest) -> GenerateRequest:
        prompt, vocabulary = np.array(wanted.prompt.to_ints()), self._plan.vocabulary
        asked, length, samples = wanted.sampling_params, len(prompt), wanted.num_samples
        top, last = wanted.topk_prompt_logprobs, wanted.prompt_logprobs_last_n
        if (prompt < 0).any() or (prompt >= vocabulary).any():
            raise Refused(f"all tokens of the prompt have to be below {vocabulary}, and none below 0")
        if top > vocabulary:
            raise Refused(f"topk_prompt_logprobs={top}, of {vocabulary} tokens that there are")
        room = (self.context_length or length + self._plan.max_tokens) - length
        most = room if asked.max_tokens is None else asked.max_tokens
        if (self.context_length and most > room) or most < 1:
            raise Refused(
                f"a prompt of {length} tokens and {most} more do not fit in the context length {self.context_length}; "
                "shorten the prompt, or ask for fewer max_tokens"
            )
        listed = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
        tokens, texts = [each for each in listed if isinstance(each, int)], list[str]()
        if asked.stop is None or len(tokens) < len(listed):
            try:
                of_texts, texts = stops_of([each for each in listed if isinstance(each, str)], self._tokenizer)
            except ValueError as error:
                raise Refused(f"stop: {error}") from None
            tokens += [*self._ends, *of_texts]
        params = SamplingParams(
            temperature=asked.temperature or 1.0,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),  # the client's -1 is all tokens
            max_tokens=most,
            stop_tokens=tuple(dict.fromkeys(tokens)),
            stop=tuple(texts),
            greedy=asked.temperature == 0.0,
            scored=(last or length) if top else 0,
            scored_top=top,
        )
        # Noise follows from the seed or, without one, from the sampler and the request's number.
        origin = (sampler.number, wanted.seq_id) if asked.seed is None else (asked.seed % 2**63,)
        return GenerateRequest(
            tokens=np.tile(prompt, samples),
            offsets=offsets_of([length] * samples),
            noise_keys=np.array([hash_key(*origin, sample) for sample in range(samples)]),
            params=params,
        )
