"""What each request means: which call of the policy it is, when that is executed, and what the client is answered."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from tinker import types as sdk

from corerl.messages import message_of, shorten
from corerl.rollout import EventLoop
from corerl_tinker import wire
from corerl_tinker.bodies import (
    Fields,
    adam_of,
    address,
    checked_name,
    checkpoint_fields,
    draw_of,
    model_of,
    read,
    run_fields,
    seconds,
    texts,
)
from corerl_tinker.checkpoints import checked_path
from corerl_tinker.futures import Answer, Futures, Promise, answered, failure
from corerl_tinker.options import ServeOptions, is_loopback
from corerl_tinker.order import ModelLost, Order, Turns
from corerl_tinker.requests import Draw, ModelWanted, Policy, Refused, Run, Saved
from corerl_tinker.sessions import GONE, Model, Sampler, Sessions

POLL_SECONDS = 40.0  # clients wait 45 s for a response
SWEEP_SECONDS = 10.0
SAMPLES_AT_ONCE = 512  # of a client, each in a connection of its own; more wait in the client


class Service:
    """The server without HTTP, within one event loop. Handlers take the JSON object of a body, which is empty where
    there is none, and words of the path; they return an answer or its fields, and raise Refused."""

    def __init__(
        self,
        policy: Policy,
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
        self._order = Order(loop, self.futures, notify=notify)

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
            "sample_max_concurrent_requests": SAMPLES_AT_ONCE,
            # Routes that are not served; clients do without them.
            "sample_use_retrieve_futures": False,
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
        request = read(sdk.CreateModelRequest, fields)
        return self._begin(request.session_id, request.model_seq_id, model_of(request))

    def _begin(
        self, session_id: str, number: int, wanted: ModelWanted, *, path: str = "", moments: bool = False
    ) -> Fields:
        """Create a model, with the weights of a checkpoint if there is a path."""
        self.sessions.seen(session_id)
        model_id = f"{session_id}:train:{number}"
        name = f"{model_id}:0"
        if (promise := self.futures.get(name)) is None:
            # Once all is lost, the promise says so, whoever trained.
            if not self._order.lost and (silent := self.sessions.silent_trainer(session_id)):
                self._notify(f"session {silent} has ended: another one trains, and its client sends no heartbeats")
                self._end(silent)
            promise = self.futures.open(name, owner=session_id, size=0, urgent=True)
            before = self.sessions.model
            turns = Turns(self._order, self.futures, clock=self._clock)
            model = Model(id=model_id, session=session_id, wanted=wanted, turns=turns)
            self.sessions.model = model

            def create() -> Answer:
                made = self._policy.create(wanted, model_id=model_id)
                try:
                    if path:
                        self._policy.load(path, optimizer=moments)
                except Refused:
                    self._policy.release()
                    raise
                model.made = made
                return answered(
                    {"model_id": model_id, "path": path, "type": "load_weights" if path else "create_model"}
                )

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
            except Refused as error:
                if not forward_only:
                    model.incomplete = (
                        f"request {number} of this model, a pass of this step, was refused: {error.sentence}"
                    )
                raise

        return self._in_turn(model_id, number, run, size=len(body))

    async def optim_step(self, fields: Fields) -> Fields:
        def step(model: Model) -> Answer:
            request = read(sdk.OptimStepRequest, fields)
            params = request.optim_params
            if not isinstance(params, sdk.AdamParams):
                raise Refused(f"the optimizer {params.type!r} is not served; use AdamParams")
            if model.incomplete:
                why, model.incomplete = model.incomplete, ""
                self._policy.discard()
                raise Refused(f"the step was not taken, and its gradients are dropped; {why}")
            metrics = self._policy.step(adam_of(params))
            return answered({"metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}})

        return self._in_turn(*address(fields), step)

    async def save_weights(self, fields: Fields) -> Fields:
        def save(model: Model) -> Answer:
            request = read(sdk.SaveWeightsRequest, fields)
            saved = self._policy.save(
                checked_name(request.path),
                ttl=seconds(request.ttl_seconds),
                overwrite=request.overwrite,
                user_metadata=texts(request.user_metadata),
            )
            return answered({"path": saved.path, "type": "save_weights"})

        return self._in_turn(*address(fields), save)

    async def load_weights(self, fields: Fields) -> Fields:
        """Into the model that there is, or as the first request of a new one."""
        if fields.get("session_id") is None:

            def load(model: Model) -> Answer:
                request = read(sdk.LoadWeightsRequest, fields)
                self._policy.load(checked_path(request.path), optimizer=request.optimizer)
                model.incomplete = ""
                return answered({"path": request.path, "model_id": model.id, "type": "load_weights"})

            return self._in_turn(*address(fields), load)
        request = read(sdk.LoadWeightsRequest, fields)
        if request.model_seq_id is None:
            raise Refused("load_weights with a session_id needs a model_seq_id")
        run, _ = await self._found(checked_path(request.path))
        wanted = ModelWanted(
            base_model=request.base_model or run.made.base_model,
            rank=run.made.rank,
            optimizer=request.optimizer_config.type if request.optimizer_config else "adamw",
            user_metadata=texts(request.user_metadata),
        )
        return self._begin(
            fields["session_id"], request.model_seq_id, wanted, path=request.path, moments=request.optimizer
        )

    def _in_turn(self, model_id: str, number: int, call: Callable[[Model], Answer], *, size: int = 0) -> Fields:
        """Promise the answer of a call of the policy, which is executed after those of lower numbers. What is wrong
        with a request is found in the call: its number is used up either way."""
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
        def save(model: Model) -> Answer:
            request = read(sdk.SaveWeightsForSamplerRequest, fields)
            sampler, saved = self._policy.save_for_sampler(
                None if request.path is None else checked_name(request.path),
                ttl=seconds(request.ttl_seconds),
                inflight=request.kind == "inflight",
                user_metadata=texts(request.user_metadata),
            )
            path = saved.path if saved else None
            base_model = model.wanted.base_model
            self.sessions.add(Sampler(id=sampler, session=model.session, base_model=base_model, model_path=path))
            found = {"path": saved.path} if saved else {"sampling_session_id": sampler}
            return answered({**found, "type": "save_weights_for_sampler"})

        return self._in_turn(*address(fields), save)

    async def create_sampling_session(self, fields: Fields) -> Answer:
        request = read(sdk.CreateSamplingSessionRequest, fields)
        session_id = request.session_id
        self.sessions.seen(session_id)
        path = None if request.model_path is None else checked_path(request.model_path)
        if path is not None:
            run, _ = await self._found(path)
            base_model = run.made.base_model
        else:
            base_model = request.base_model or ""
        name = f"{session_id}:sample:{request.sampling_session_seq_id}"
        if (promise := self.futures.get(name)) is None:
            promise = self.futures.open(name, owner=session_id, size=0, urgent=True)

            def create() -> Answer:
                sampler = self._policy.sampler(path, None if path else base_model)
                self.sessions.add(Sampler(id=sampler, session=session_id, base_model=base_model, model_path=path))
                return answered({"sampling_session_id": sampler, "type": "create_sampling_session"})

            self.futures.fill(promise, self._order.begin(create))
        answer = await self._wait(promise)
        if answer.error:
            raise Refused(answer.error)
        return answer

    async def get_sampler(self, fields: Fields, sampler: str) -> Fields:
        known = self.sessions.sampler(sampler)
        return {"sampler_id": known.id, "base_model": known.base_model, "model_path": known.model_path}

    async def asample(self, fields: Fields) -> Fields:
        request = read(sdk.SampleRequest, fields)
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refused("asample needs a sampling_session_id and a seq_id, as a SamplingClient sends them")
        sampler = self.sessions.sampler(request.sampling_session_id)
        name = f"{sampler.id}:{request.seq_id}"
        wanted = draw_of(request, fields["sampling_params"], longest=self._options.tokens_per_row)
        if (promise := self.futures.get(name)) is None:
            promise = self.futures.open(name, owner=sampler.session, size=wanted.prompt.nbytes)
            self.futures.fill(promise, asyncio.create_task(self._drawn(wanted)))
        return {
            "request_id": promise.name,
            "sample_sequence_ids": [f"{name}:{number}" for number in range(request.num_samples)],
        }

    async def _drawn(self, wanted: Draw) -> Answer:
        if self._order.lost:
            raise ModelLost(self._order.lost)
        try:
            return wire.sample_answer(await self._policy.draw(wanted, self._order.begin))
        except (Refused, ModelLost):
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

    async def _wait(self, promise: Promise) -> Answer:
        self.sessions.seen(promise.owner)
        answer = await self.futures.wait(promise, POLL_SECONDS)
        if answer is None:
            raise Refused(f"request {promise.name!r} is not done yet; ask again", status=408)
        return answer

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    async def training_runs(self, fields: Fields) -> Fields:
        runs = [run_fields(run) for run in await self._runs()]
        return {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}

    async def training_run(self, fields: Fields, run: str) -> Fields:
        return run_fields(await self._run(run))

    async def checkpoints(self, fields: Fields, run: str = "") -> Fields:
        runs = [await self._run(run)] if run else await self._runs()
        return {"checkpoints": [checkpoint_fields(saved) for each in runs for saved in each.checkpoints]}

    async def weights_info(self, fields: Fields) -> Fields:
        run, _ = await self._found(checked_path(fields.get("tinker_path")))
        return {"base_model": run.made.base_model, "is_lora": run.made.rank is not None, "lora_rank": run.made.rank}

    async def delete_checkpoint(self, fields: Fields, run: str, checkpoint: str) -> None:
        _, saved = await self._found(checked_path(f"tinker://{run}/{checkpoint}"))
        await asyncio.to_thread(self._policy.delete, saved.path)

    async def expire_checkpoint(self, fields: Fields, run: str, checkpoint: str) -> None:
        _, saved = await self._found(checked_path(f"tinker://{run}/{checkpoint}"))
        ttl = seconds(fields.get("ttl_seconds"))
        await asyncio.to_thread(self._policy.expire, saved.path, ttl=ttl)

    async def _runs(self) -> list[Run]:
        return list(await asyncio.to_thread(self._policy.runs))

    async def _run(self, name: str) -> Run:
        for run in await self._runs():
            if run.id == name:
                return run
        raise Refused(f"training run {shorten(name, 200)!r} has no checkpoint here, and is not trained now", status=404)

    async def _found(self, path: str) -> tuple[Run, Saved]:
        run = await self._run(path.split("/")[2])
        for saved in run.checkpoints:
            if saved.path == path:
                return run, saved
        raise Refused(f"there is no checkpoint {path!r} here (any more)", status=404)

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
