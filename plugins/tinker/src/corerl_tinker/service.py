"""What each request means: which call of the policy it is, when that is executed, and what the client is answered."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import pydantic
from tinker import types as sdk
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest

from corerl.errors import UserError
from corerl.messages import message_of
from corerl.rollout import EventLoop
from corerl_tinker import wire
from corerl_tinker.bodies import Fields, address, checkpoint_fields, draw_of, read, run_fields
from corerl_tinker.futures import Answer, Futures, Promise, answered, failure
from corerl_tinker.options import ServeOptions, is_loopback
from corerl_tinker.order import Order, Turns
from corerl_tinker.requests import Draw, Refused
from corerl_tinker.sessions import GONE, Model, Sessions

if TYPE_CHECKING:
    from corerl_tinker.training import ServedPolicy

Request = TypeVar("Request", bound=pydantic.BaseModel)

POLL_SECONDS = 40.0  # clients wait 45 s for a response
SWEEP_SECONDS = 10.0


class Service:
    """The server without HTTP, within one event loop. Handlers take the JSON object of a body, which is empty where
    there is none, and words of the path; they return an answer or its fields, and raise Refused."""

    def __init__(
        self,
        policy: ServedPolicy,
        options: ServeOptions,
        loop: EventLoop,
        *,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`loop` is the one that serves; the thread that waits in its `run` is the group's."""
        self._policy, self._options, self._notify, self._clock = policy, options, notify, clock
        self._names = (options.name, *options.aliases)
        self.futures = Futures(most_bytes=options.memory_mib << 20, clock=clock)
        self.sessions = Sessions(idle_seconds=options.idle_minutes * 60, clock=clock)
        self._order = Order(loop, self.futures, ended=lambda: policy.ended, notify=notify)

    async def work(self) -> None:
        """Execute what is asked for, and give up who has gone, until this task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._order.work())
            tasks.create_task(self._sweep())

    # ---- sessions ----------------------------------------------------------------------------------------------------

    async def client_config(self, fields: Fields) -> Fields:
        return {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": not is_loopback(self._options.address),
            "parallel_fwdbwd_chunks": True,
            "sample_use_retrieve_futures": True,  # else each sample has a connection of its own, which it waits in
            # Routes that are not served; clients do without them.
            "sample_join_sampling_session": False,
            "custom_loss_server_side": False,
        }

    async def create_session(self, fields: Fields) -> Fields:
        read(sdk.CreateSessionRequest, fields)
        return {"session_id": self.sessions.begin(), "error_message": self._order.lost or None}

    async def session_heartbeat(self, fields: Fields) -> Fields:
        self.sessions.seen(read(sdk.SessionHeartbeatRequest, fields).session_id)
        return {}

    async def finish_session(self, fields: Fields, session: str) -> None:
        self._end(session)

    def _end(self, session: str) -> None:
        """What only this session has is given up."""
        model = self.sessions.model
        self.sessions.end(session)
        if model is not None and model.session == session:
            self._order.begin(self._policy.release)
        self.futures.give_up(session, failure(f"session {session} has ended", "user"))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """End sessions that are silent, and close gaps that nobody fills."""
        for session in self.sessions.idle():
            self._notify(f"session {session} has ended: no heartbeat for {self._options.idle_minutes:g} minutes")
            self._end(session)
        if (model := self.sessions.model) is not None and (sentence := model.turns.close_gap()):
            model.incomplete = sentence
        self.futures.forget()

    # ---- a model -----------------------------------------------------------------------------------------------------

    async def create_model(self, fields: Fields) -> Fields:
        return self._begin(read(sdk.CreateModelRequest, fields))

    def _begin(self, wanted: sdk.CreateModelRequest, *, path: str = "", moments: bool = False) -> Fields:
        """Create a model, with the weights of a checkpoint if there is a path."""
        session_id = wanted.session_id
        self.sessions.seen(session_id)
        model_id = f"{session_id}:train:{wanted.model_seq_id}"
        name = f"{model_id}:0"
        if (promise := self.futures.get(name)) is None:
            # Once all is lost, the promise says so, whoever trained.
            if not self._order.lost and (silent := self.sessions.silent_trainer(session_id)):
                self._notify(f"session {silent} has ended: another one trains, and its client sends no heartbeats")
                self._end(silent)
            promise = self.futures.open(name, owner=session_id, urgent=True)
            before = self.sessions.model
            turns = Turns(self._order, self.futures, clock=self._clock)
            model = self.sessions.model = Model(id=model_id, session=session_id, turns=turns)

            def create() -> Answer:
                made = self._policy.create(wanted, model_id=model_id)
                try:
                    if path:
                        self._policy.load(path, optimizer=moments)
                except UserError:
                    self._policy.release()
                    raise
                model.made = made
                kind = "load_weights" if path else "create_model"
                return answered({"model_id": model_id, "path": path, "type": kind})

            def created(work: asyncio.Future[Answer]) -> None:
                failed = work.cancelled() or work.exception() is not None
                if failed and self.sessions.model is model:
                    self.sessions.model = before if before is not None and before.made is not None else None
                elif not failed and before is not None:
                    before.turns.give_up(f"model {before.id!r} is given up: its session has created {model_id!r}")

            work = self._order.begin(create)
            work.add_done_callback(created)
            self.futures.fill(promise, work)
        return {"request_id": promise.name, "model_id": model_id}

    async def get_info(self, fields: Fields) -> Fields:
        model = self.sessions.trained(read(sdk.GetInfoRequest, fields).model_id)
        if model.made is None:
            raise Refused(f"model {model.id!r} is not there yet; wait for the request that creates it")
        made = model.made
        return {
            "type": "get_info",
            "model_data": {"model_name": made.base_model, "tokenizer_id": made.tokenizer},
            "model_id": model.id,
            "model_name": made.base_model,
            "is_lora": made.rank is not None,
            "lora_rank": made.rank,
        }

    async def forward_backward(self, body: bytes) -> Fields:
        message = await asyncio.to_thread(wire.parsed, body)
        try:
            wanted = await asyncio.to_thread(wire.read_pass, message, longest=self._options.tokens_per_row)
        except Refused as error:
            refused, wanted = error, None
        model_id, number, forward_only = message.model_id, message.seq_id, message.forward_only
        del message

        def run(model: Model) -> Answer:
            try:
                if wanted is None:
                    raise refused
                return wire.pass_answer(self._policy.run(wanted))
            except UserError as error:
                if not forward_only:
                    model.incomplete = (
                        f"request {number} of this model, a pass of this step, was refused: {error.message}"
                    )
                raise

        return self._numbered(model_id, number, run, size=len(body))

    async def optim_step(self, fields: Fields) -> Fields:
        def step(model: Model, request: sdk.OptimStepRequest) -> Fields:
            if not isinstance(params := request.optim_params, sdk.AdamParams):
                raise Refused(f"the optimizer {params.type!r} is not served; use AdamParams")
            if model.incomplete:
                why, model.incomplete = model.incomplete, ""
                self._policy.discard()
                raise Refused(f"the step was not taken, and its gradients are dropped; {why}")
            metrics = self._policy.step(params)
            return {"metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}}

        return self._in_turn(fields, sdk.OptimStepRequest, step)

    async def save_weights(self, fields: Fields) -> Fields:
        def save(model: Model, request: sdk.SaveWeightsRequest) -> Fields:
            saved = self._policy.save(
                request.path or "",
                ttl=request.ttl_seconds,
                overwrite=request.overwrite,
                user_metadata=request.user_metadata,
            )
            return {"path": saved.path, "type": "save_weights"}

        return self._in_turn(fields, sdk.SaveWeightsRequest, save)

    async def load_weights(self, fields: Fields) -> Fields:
        """Into the model that there is, or as the first request of a new one."""

        def load(model: Model, request: sdk.LoadWeightsRequest) -> Fields:
            self._policy.load(request.path, optimizer=request.optimizer)
            model.incomplete = ""
            return {"path": request.path, "model_id": model.id, "type": "load_weights"}

        if fields.get("session_id") is None:
            return self._in_turn(fields, sdk.LoadWeightsRequest, load)
        request = read(sdk.LoadWeightsRequest, fields)
        if request.session_id is None or request.model_seq_id is None:
            raise Refused("load_weights with a session_id needs a model_seq_id")
        run, _ = await asyncio.to_thread(self._policy.checkpoints.find, request.path)
        wanted = sdk.CreateModelRequest(
            session_id=request.session_id,
            model_seq_id=request.model_seq_id,
            base_model=request.base_model or run.made.base_model,
            optimizer_config=request.optimizer_config or sdk.AdamOptimizerConfig(),
            user_metadata=request.user_metadata,
        )
        return self._begin(wanted, path=request.path, moments=request.optimizer)

    def _in_turn(self, fields: Fields, cls: type[Request], call: Callable[[Model, Request], Fields]) -> Fields:
        """As `_numbered`, of a request in JSON. What is wrong with it is found in the call, and its number used up."""
        return self._numbered(*address(fields), lambda model: answered(call(model, read(cls, fields))))

    def _numbered(self, model_id: str, number: int, call: Callable[[Model], Answer], *, size: int = 0) -> Fields:
        """Promise the answer of a call of the policy, which is executed after those of lower numbers."""
        model = self.sessions.trained(model_id)
        name = f"{model_id}:{number}"
        if (promise := self.futures.get(name)) is None:
            if number < model.turns.next:
                raise Refused(
                    f"request {number} of model {model_id!r} was answered, and its answer is forgotten", status=GONE
                )
            promise = self.futures.open(name, owner=model.session, size=size, urgent=number == model.turns.next)

            def of_model() -> Answer:
                if model.made is None:  # or another one would be trained
                    raise Refused(f"model {model_id!r} was not created: request {model_id}:0 was refused")
                return call(model)

            model.turns.add(number, promise, of_model)
        return {"request_id": promise.name, "model_id": model_id}

    # ---- samplers ----------------------------------------------------------------------------------------------------

    async def save_weights_for_sampler(self, fields: Fields) -> Fields:
        def save(model: Model, request: sdk.SaveWeightsForSamplerRequest) -> Fields:
            sampler = self._policy.save_for_sampler(
                request.path,
                ttl=request.ttl_seconds,
                inflight=request.kind == "inflight",
                user_metadata=request.user_metadata,
            )
            sampler_id = self.sessions.add(model.session, sampler)
            path = sampler.model_path
            found = {"path": path} if path else {"sampling_session_id": sampler_id}
            return {**found, "type": "save_weights_for_sampler"}

        return self._in_turn(fields, sdk.SaveWeightsForSamplerRequest, save)

    async def create_sampling_session(self, fields: Fields) -> Answer:
        request = read(sdk.CreateSamplingSessionRequest, fields)
        session_id, path = request.session_id, request.model_path
        self.sessions.seen(session_id)
        if path is not None:
            await asyncio.to_thread(self._policy.checkpoints.find, path)
        name = f"{session_id}:sample:{request.sampling_session_seq_id}"
        if (promise := self.futures.get(name)) is None:
            promise = self.futures.open(name, owner=session_id, urgent=True)

            def create() -> Answer:
                sampler = self._policy.sampler(path, request.base_model or "")
                sampler_id = self.sessions.add(session_id, sampler)
                return answered({"sampling_session_id": sampler_id, "type": "create_sampling_session"})

            self.futures.fill(promise, self._order.begin(create))
        answer = await self._wait(promise)
        if answer.error:
            raise Refused(answer.error)
        return answer

    async def get_sampler(self, fields: Fields, sampler: str) -> Fields:
        found = self.sessions.sampling(sampler).sampler
        return {"sampler_id": sampler, "base_model": found.base_model, "model_path": found.model_path}

    async def asample(self, fields: Fields) -> Fields:
        request = read(sdk.SampleRequest, fields)
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refused("asample needs a sampling_session_id and a seq_id, as a SamplingClient sends them")
        at = self.sessions.sampling(request.sampling_session_id)
        name = f"{request.sampling_session_id}:{request.seq_id}"
        wanted = draw_of(request, fields["sampling_params"], sampler=at.sampler, longest=self._options.tokens_per_row)
        if (promise := self.futures.get(name)) is None:
            promise = self.futures.open(name, owner=at.session, size=wanted.prompt.nbytes)
            promise.answer.add_done_callback(lambda _: at.done.add(name))
            self.futures.fill(promise, asyncio.create_task(self._drawn(wanted)))
        return {
            "request_id": promise.name,
            "sample_sequence_ids": [f"{name}:{number}" for number in range(request.num_samples)],
        }

    async def _drawn(self, wanted: Draw) -> Answer:
        self._order.require()
        try:
            return wire.sample_answer(await self._policy.draw(wanted, self._order.begin))
        except UserError:
            raise
        except Exception as error:
            self._notify(f"sampling has failed: {message_of(error)}")
            raise

    # ---- promises ----------------------------------------------------------------------------------------------------

    async def retrieve_future(self, fields: Fields) -> Answer:
        name = read(sdk.FutureRetrieveRequest, fields).request_id
        if (promise := self.futures.get(name)) is not None:
            return await self._wait(promise)
        if self.sessions.was_answered(*name.rpartition(":")[::2]):
            raise Refused(f"the answer to request {name!r} was fetched before, and is forgotten", status=GONE)
        raise Refused(
            f"request {name!r} is not known: its session has ended, or it was made of an earlier server; begin another "
            "session, and resume from a saved state",
            status=404,
        )

    async def retrieve_futures(self, fields: Fields) -> Fields:
        """Which requests of a sampler are done; their answers are fetched one by one."""
        request = read(FuturesRetrieveRequest, fields)
        done = self.sessions.sampling(request.target.sampling_session_id).done
        for name in request.retrieved_request_ids:
            self.futures.fetched(name)
        seconds = POLL_SECONDS if request.timeout is None else min(request.timeout, POLL_SECONDS)
        names, cursor = await done.after(request.prev_cursor, seconds)
        return {"completions": [self._completion(name) for name in names], "cursor": cursor}

    def _completion(self, name: str) -> Fields:
        promise = self.futures.get(name)
        if promise is None:  # fetched before, and forgotten, which whoever asks again is told
            return {"request_id": name, "state": "finished"}
        answer = promise.answer.result()
        if answer.error:
            return {"request_id": name, "state": "failed"}
        return {"request_id": name, "state": "finished", "response_payload_uncompressed_size": len(answer.body)}

    async def _wait(self, promise: Promise) -> Answer:
        self.sessions.seen(promise.owner)
        answer = await self.futures.wait(promise, POLL_SECONDS)
        if answer is None:
            raise Refused(f"request {promise.name!r} is not done yet; ask again", status=408)
        return answer

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    async def training_runs(self, fields: Fields) -> Fields:
        runs = [run_fields(run) for run in await asyncio.to_thread(self._policy.checkpoints.runs)]
        return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}

    async def training_run(self, fields: Fields, run: str) -> Fields:
        return run_fields(await asyncio.to_thread(self._policy.checkpoints.run, run))

    async def checkpoints(self, fields: Fields, run: str = "") -> Fields:
        kept = self._policy.checkpoints
        runs = [await asyncio.to_thread(kept.run, run)] if run else await asyncio.to_thread(kept.runs)
        return {"checkpoints": [checkpoint_fields(saved) for each in runs for saved in each.checkpoints]}

    async def weights_info(self, fields: Fields) -> Fields:
        run, _ = await asyncio.to_thread(self._policy.checkpoints.find, fields.get("tinker_path"))
        return {"base_model": run.made.base_model, "is_lora": run.made.rank is not None, "lora_rank": run.made.rank}

    async def delete_checkpoint(self, fields: Fields, run: str, checkpoint: str) -> None:
        await asyncio.to_thread(self._policy.checkpoints.delete, f"tinker://{run}/{checkpoint}")

    async def expire_checkpoint(self, fields: Fields, run: str, checkpoint: str) -> None:
        path, ttl = f"tinker://{run}/{checkpoint}", fields.get("ttl_seconds")
        await asyncio.to_thread(self._policy.checkpoints.expire, path, ttl=ttl)

    # ---- the server --------------------------------------------------------------------------------------------------

    async def capabilities(self, fields: Fields) -> Fields:
        length = self._options.context_length
        models = [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in self._names
        ]
        return {"supported_models": models}

    async def health(self, fields: Fields) -> Fields:
        return {"status": "ok"}

    async def telemetry(self, fields: Fields) -> Fields:
        """Clients send stack traces and headers of failed requests. They are not kept."""
        return {"status": "accepted"}
