"""A rollout engine backed by an SGLang server: token ids in, token ids and log-probs out; its ranks receive weights."""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from attrs import evolve

from corerl.config import ModelConfig
from corerl.engines import (
    CacheUse,
    Engine,
    EngineContext,
    EngineLifecycle,
    GenerateRequest,
    Generation,
    OnFinished,
    Received,
    SamplingParams,
    Watch,
    ignore,
    shape_mismatch,
)
from corerl.errors import ConfigError, CorerlError, EngineFailed, WeightUpdateError, WorkerDied
from corerl.messages import message_of
from corerl.models import build_on_meta, hf_boxes, hf_config, put_adapters
from corerl.pictures import Picture
from corerl.types import offsets_of
from corerl.weights import Address, Manifest, as_sent, is_adapter, is_quantized
from corerl_sglang.adapters import Adapters, modules_of, require_able
from corerl_sglang.arguments import LOADER, add_published_fields, server_arguments
from corerl_sglang.config import CALLS, ROWS, SglangConfig
from corerl_sglang.fp8 import quantization
from corerl_sglang.held import whole_sums
from corerl_sglang.instruction import Answer, Instruction, Question, name_for, read_answers, write_instruction
from corerl_sglang.pictures import IN_TEXT, body_of, files_of, placeholder_of, write_processor
from corerl_sglang.read import Cut, Experts, Parts, Reader, Sample, waited
from corerl_sglang.server import Refused, Server

WEIGHTS = "weights"
CACHES = ("kv_cache", "cuda_graph")  # SGLang's other memory tags
MOST_CALLS = 512  # to the server at once, of one call for rows with pictures
IDLE_SECONDS = 60.0  # for a server to become idle after its last answer
LOOK = 64  # tokens of a row after which it is looked at, if it is watched: what follows a stop text is wasted
ABORT_SECONDS = 0.1  # between two attempts to abort what is being generated
WATCHDOG_SECONDS = 300.0  # for a forward pass, after which SGLang ends itself: its default of `watchdog_timeout`
# What SGLang (0.5.17) refuses a request with, all of its rows, if it is aborted before the scheduler has them: with
# adapters, for instance, while they are looked up.
ABORTED = "was aborted"


class SglangEngine(Engine):
    def __init__(self, model: ModelConfig, options: SglangConfig, context: EngineContext, server: Server) -> None:
        """`server` has been started, and is stopped if the engine cannot be made."""
        self._options, self._context = options, context
        self._serving = EngineLifecycle(context.name, context.index, calls=CALLS, versions=context.weights.versions)
        self._sleeping: set[str] = set()  # tags
        self._waking = threading.Lock()  # several calls may find the caches asleep at once
        # The first one, which caused all calls in flight to be aborted. The fleet ends an engine after it.
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        self._retracted = 0  # rows, of all that have ended
        self._server = server
        self._directory = self._server.directory
        with contextlib.ExitStack() as undo:  # unless all goes well
            undo.callback(self._server.stop)
            modules = self._describe(model)
            arguments = server_arguments(
                options,
                context,
                model=self._directory / "model",
                adapted=modules,
                vocabulary=model.vocabulary,
                shown=self._kind,
            )
            self._server.configure(arguments)
            self._adapters: Adapters | None = None
            if context.lora is not None:
                self._adapters = Adapters(self._server, context.lora, modules, ranks=len(context.receivers))
            self._server.wait_ready(options.start_timeout)
            # Spare the server's garbage collector everything that exists by now. Optional, so a refusal is fine.
            with contextlib.suppress(EngineFailed):
                self._server.post("/freeze_gc")
            info = self._server.get("/server_info")
            self._bytes = memory_of(info, context.bundles)
            # Tokens, of all attention groups.
            self._capacity = sum(each["memory_usage"]["token_capacity"] for each in info["internal_states"])
            undo.pop_all()

    def _describe(self, model: ModelConfig) -> list[str]:
        """Write the model's config for the server; returns the modules that have adapters."""
        context = self._context
        config = hf_config(model)
        built = build_on_meta(config, dtype=torch.float32, attention="eager", pictures=bool(model.pictures))
        if context.lora is not None:
            put_adapters(built, context.lora, dtype=torch.float32)
        shapes = {box.name: box.shape for boxes in hf_boxes(built).values() for box in boxes}
        self._shapes = shapes  # of the tensors sent to this engine
        if context.weights.quantize == "fp8":
            left_out = context.weights.unquantized
            sent = [as_sent(name, shape, "", left_out) for name, shape in shapes.items()]
            self._shapes = {name: shape for each in sent for name, shape, _ in each}
            matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")]
            kept = [name for name in matrices if not is_quantized(name, shapes[name], left_out)]
            config.quantization_config = quantization([name.removesuffix(".weight") for name in kept])
        modules = modules_of(name for name in shapes if is_adapter(name))
        if context.lora is not None:
            require_able(modules)
        self._reader = Reader(engine=context.name, experts=Experts.of(built), pictures=model.pictures)
        self._kind = config.model_type if model.pictures else ""  # of a model that is shown pictures
        self._placeholder = placeholder_of(config) if model.pictures else -1
        # Otherwise the model's own end of sequence would end samples that [rollout] does not.
        config.eos_token_id = config.get_text_config().eos_token_id = None
        add_published_fields(config)
        config.save_pretrained(self._directory / "model")
        if model.pictures:
            write_processor(model, self._directory / "model")
        return modules

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, on_finished: OnFinished = ignore) -> Generation:
        return self._sample(request, None, on_finished)

    def generate_watched(self, request: GenerateRequest, watch: Watch, on_finished: OnFinished = ignore) -> Generation:
        return self._sample(request, watch, on_finished)

    def _sample(self, request: GenerateRequest, watch: Watch | None, on_finished: OnFinished) -> Generation:
        try:
            return self._spread(request, watch, on_finished)
        except WorkerDied:
            self._server.stop()  # with all its ranks: this engine's replacement starts its own server
            raise

    def _spread(self, request: GenerateRequest, watch: Watch | None, on_finished: OnFinished) -> Generation:
        self._server.require_alive("generate")
        if request.params.routed_experts and not self._options.routed_experts:
            raise ConfigError(
                "engines.sglang.routed_experts: false, but algorithm.routing_replay='engine' needs the engine's "
                "experts; set it to true"
            )
        with self._serving.generating(request.version) as version:
            if self._serving.paused:
                return self._reader.nothing(request)
            self._resume({*CACHES})  # only now: others on the device may have used that memory
            # Not one request per row: SGLang handles all requests in one event loop, at a fixed cost each. Not one for
            # all rows either: answers are parsed here while the server still writes the rest. But with pictures one per
            # row: SGLang (0.5.17) prepares a request's rows one by one, and forgets those that have ended meanwhile.
            count = min(self._options.requests, max(1, len(request) // ROWS))
            parts = request.parts(len(request) if request.pictures else count)
            workers = min(len(parts), MOST_CALLS)

            def answered(part: GenerateRequest, first: int) -> Generation:
                if self._serving.paused:  # since the call began, which has more parts than threads
                    return self._reader.nothing(part)
                seen = watch and (lambda row, tokens: watch(first + row, tokens))
                return self._generate(part, version, seen, on_finished, files)

            with files_of(request.pictures, self._directory) as files, ThreadPoolExecutor(workers) as threads:
                firsts = offsets_of([len(part) for part in parts])[:-1].tolist()
                futures = [threads.submit(answered, *each) for each in zip(parts, firsts, strict=True)]
                wait(futures, return_when=FIRST_EXCEPTION)
                failures = [failure for future in futures if future.done() and (failure := future.exception())]
                # The cause first: a death explains any other failure, and any failure explains an aborted row.
                failures.sort(key=lambda each: (not isinstance(each, WorkerDied), isinstance(each, Cut)))
                if failures:
                    first = self._first(failures[0])
                    # All requests, also of other calls, whose samples are lost too; and again, since some may still be
                    # on their way to the server.
                    abort = self._aborting()
                    abort()
                    while wait(futures, timeout=ABORT_SECONDS).not_done:
                        abort()
            if failures:
                raise first
            return Generation.concatenate([future.result() for future in futures])

    def _first(self, failure: BaseException) -> BaseException:
        """The exception for a failed call to raise: the first failure, if that caused this call to be aborted too."""
        with self._failing:
            if self._failure is None:
                self._failure = failure
            if isinstance(failure, Cut) and self._failure is not failure:
                return EngineFailed(message_of(self._failure))
            return failure

    def _generate(
        self,
        request: GenerateRequest,
        version: int,
        watch: Watch | None,
        on_finished: OnFinished,
        files: Mapping[Picture, str],
    ) -> Generation:
        body: dict[str, Any] = {
            "input_ids": [prompt.tolist() for prompt in request.by_row()],
            "sampling_params": [
                self._sampling(request.params, int(key), int(left))
                for key, left in zip(request.noise_keys, request.left, strict=True)
            ],
            "return_logprob": True,
            "return_routed_experts": request.params.routed_experts,
        }
        if request.params.scored:
            # The server gives no log-prob of the token it begins with, and the likeliest ones in one piece.
            starts = np.maximum(np.diff(request.offsets) - 1 - request.params.scored, 0)
            body |= {"logprob_start_len": starts.tolist(), "top_logprobs_num": request.params.scored_top}
            body |= dict.fromkeys(("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"), True)
        if request.pictures:
            in_text = self._kind in IN_TEXT
            body |= body_of(request, files, self._placeholder, in_text=in_text, engine=self._context.name)
            body["return_prompt_token_ids"] = True
        if self._adapters is not None:
            body["lora_path"] = self._adapters.name(version)
        enough: set[int] = set()  # rows
        try:
            if watch is None:
                samples = self._reader.samples(self._server.post("/generate", body))
            else:
                samples = self._watched(body, watch, enough)
        except EngineFailed as failure:
            self._keep_adapters(version)  # nobody is told how its rows have ended, or will
            if not (isinstance(failure, Refused) and ABORTED in failure.message):
                raise
            if not self._serving.paused:
                raise Cut(failure.message) from failure
            return self._reader.nothing(request)
        if any(map(waited, samples)):
            self._keep_adapters(version)
        newest = self._serving.held[-1]  # by which the server calls its weights, whatever adapters it applies to them
        cut = range(len(request)) if self._serving.paused else enough
        sampled = self._reader.generation(samples, request, newest, cut=cut, on_retracted=self._count_retracted)
        sampled = evolve(sampled, versions=np.full_like(sampled.versions, version))
        on_finished(len(enough.union(np.flatnonzero(~sampled.unfinished).tolist())))
        return sampled

    def _keep_adapters(self, version: int) -> None:
        if self._adapters is not None:
            self._adapters.keep(version)

    def _watched(self, body: Mapping[str, Any], watch: Watch, enough: set[int]) -> list[Sample]:
        """The samples of a request, each ended once `watch` says so; `enough` takes those rows."""
        requests = [uuid.uuid4().hex for _ in body["input_ids"]]
        params = [{**each, "stream_interval": LOOK} for each in body["sampling_params"]]
        parts = Parts(self._context.name, len(requests))
        asked = {**body, "sampling_params": params, "rid": requests, "stream": True}
        for data in self._server.stream("/generate", asked):
            row, tokens, goes_on = parts.take(data)
            if row not in enough and watch(row, tokens):
                enough.add(row)
                if goes_on:
                    self._server.post("/abort_request", {"rid": requests[row], "abort_all": False}, at_once=True)
        return parts.samples()

    def _count_retracted(self, times: int) -> None:
        with self._failing:
            self._retracted += times

    def cache_use(self) -> CacheUse:
        """Of all attention groups together, as the schedulers last told the server's HTTP process, which asks none of
        them. What is kept of rows that have ended, in case others begin with it, does not count. The tokens of a row
        that is retracted do, since it waits; as retracted it counts once it has ended."""
        loads = self._server.get("/v1/loads?include=core")["loads"]
        tokens = sum(each["num_total_tokens"] for each in loads)
        return CacheUse(capacity=self._capacity, tokens=tokens, retracted=self._retracted)

    def _sampling(self, params: SamplingParams, key: int, left: int) -> dict[str, Any]:
        """One row's parameters, by SGLang's names; the defaults of all others leave the distribution unchanged."""
        # 0 makes SGLang take the likeliest token.
        shape = {"temperature": 0.0}
        if not params.greedy:
            # -1 is all tokens. SGLang applies both to the whole distribution, as `SamplingParams` says.
            shape = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or -1}
        seed = {"sampling_seed": key} if self._options.deterministic else {}
        return {**shape, **seed, "max_new_tokens": left, "stop_token_ids": list(params.stop_tokens)}

    def _aborting(self) -> Callable[[], None]:
        """A function to call until nothing is being generated: it aborts all requests, and ends a server that has not
        ended them in time, such as one that has lost a request."""
        # The forward pass that a request is in may take as long as SGLang lets it.
        limit = (self._options.server.get("watchdog_timeout") or WATCHDOG_SECONDS) + self._options.health_timeout
        until = time.monotonic() + limit

        def abort() -> None:
            if time.monotonic() > until and self._server.alive:
                self._server.give_up(f"had not ended requests {limit:g} s after they were aborted and was killed")
            with contextlib.suppress(CorerlError):  # the earlier error takes precedence
                self._server.post("/abort_request", {"rid": "", "abort_all": True}, at_once=True)

        return abort

    def pause(self) -> None:
        self._serving.pause(self._aborting())

    def resume(self) -> None:
        self._serving.resume()

    # ---- weights -----------------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, version: int, address: Address) -> Received:
        """Have each of the server's ranks receive in its own process; see `loader`."""

        def transfer() -> int:
            self._server.require_alive("receive")
            if refused := self._mismatch(manifest):
                raise WeightUpdateError(refused)
            return self._transfer(manifest, version, address)

        alone = all(map(is_adapter, manifest.names))
        received = self._serving.update(version, transfer, alone=alone)
        return evolve(received, died=bool(received.error) and not self._server.alive)

    def forget(self, version: int) -> None:
        self._serving.forget(version)

    def _mismatch(self, manifest: Manifest) -> str:
        """Why this manifest cannot be loaded; "" if it can. SGLang itself silently skips unknown names."""
        if WEIGHTS in self._sleeping:
            return "the engine's weights are asleep; wake it up first"
        return shape_mismatch(manifest.shapes, self._shapes, whole=self._serving.holds_weights)

    def _transfer(self, manifest: Manifest, version: int, address: Address) -> int:
        """Have the ranks take the update; returns bytes."""
        apart = self._adapters
        room = None if apart is None else apart.room(manifest)
        instruction = Instruction(
            manifest=manifest,
            version=version,
            address=address,
            receivers=tuple(self._context.receivers),
            adapters="" if room is None else room.path,
        )
        answers = self._ask_ranks(instruction)
        if apart is not None and room is not None:
            most = self._context.weights.versions
            stay = (*(self._serving.held if all(map(is_adapter, manifest.names)) else ()), version)[-most:]
            apart.load(version, room, stay)
        self._server.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        return max((answer.bytes for answer in answers), default=0)

    def _ask_ranks(self, asked: Instruction | Question) -> list[Answer]:
        """Send an instruction to all ranks; returns each one's answer. Raises if a rank fails or gives none."""
        ranks = len(self._context.receivers)
        answers: list[Answer | None] = []
        path = write_instruction(self._directory, asked)
        try:
            self._settle()  # also empties the prefix cache, whose keys and values are of the old weights
            names = [[(name_for(path, rank), torch.empty(0))] for rank in range(ranks)]
            body = {
                "serialized_named_tensors": [serialized(each) for each in names],
                "load_format": LOADER,
                "flush_cache": False,
            }
            self._server.post("/update_weights_from_tensor", body)
        finally:
            answers = read_answers(path, ranks)
        given = [answer for answer in answers if answer is not None]
        if wrong := next((answer.error for answer in given if answer.error), ""):
            raise WeightUpdateError(wrong)
        if len(given) < ranks:
            raise WeightUpdateError("a rank of its server did not answer")
        return given

    def weight_sums(self, dtype: str) -> Mapping[str, int] | None:
        """Sums of tensors in the dtypes they came in, read where each rank first saw them loaded; see `held`. Tensors
        that SGLang does not plainly copy into a parameter, such as scalars or converted ones, are left out."""
        try:
            answers = self._ask_ranks(Question())
        except (WeightUpdateError, EngineFailed, OSError) as failure:
            self._server.require_alive("weight_sums")
            name = self._context.name
            raise EngineFailed(f"{name} cannot report its weights: {message_of(failure)}") from failure
        return whole_sums(self._context.name, self._shapes, [answer.sums for answer in answers]) or None

    def _settle(self) -> None:
        """Wait until nothing runs, and empty the prefix cache. A busy server asked to release memory ends itself."""
        if "kv_cache" not in self._sleeping:
            self._server.post(f"/flush_cache?timeout={IDLE_SECONDS:g}")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        if WEIGHTS in self._sleeping:
            return 0
        with self._serving.dropping_weights("its weights were put to sleep"):
            self._settle()
            tags = [tag for tag in (*CACHES, WEIGHTS) if tag not in self._sleeping]
            self._server.post("/release_memory_occupation", {"tags": tags})
            self._sleeping.update(tags)
        return sum(self._bytes.get(tag, 0) for tag in tags)

    def wake_up(self) -> int:
        """Resume only the weights' memory. The first request resumes the caches', when others on the device sleep."""
        if WEIGHTS not in self._sleeping:
            return 0
        with self._serving.dropping_weights("no weights have arrived since it woke up"):
            self._resume({WEIGHTS})
        return self._bytes[WEIGHTS]

    def _resume(self, tags: set[str]) -> None:
        with self._waking:
            if asleep := sorted(tags & self._sleeping):
                self._server.post("/resume_memory_occupation", {"tags": asleep})
                self._sleeping.difference_update(asleep)

    def close(self) -> None:
        self._server.stop()  # first: others may wait for what is being generated
        self._serving.close()
        if self._adapters is not None:
            self._adapters.close()


def memory_of(info: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Bytes by tag on all devices of a replica, from the GiB that the server reports for one rank."""
    used = info["internal_states"][0]["memory_usage"]
    return {WEIGHTS: round(used["weight"] * 2**30) * ranks, "kv_cache": round(used["kvcache"] * 2**30) * ranks}


def serialized(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """A base64 pickle for SGLang's endpoint, which unpickles only torch's and Python's own classes."""
    return base64.b64encode(pickle.dumps(list(named_tensors))).decode()
