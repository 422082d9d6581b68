"""What each request means: which call of the policy it is, when that is executed, and what the client is answered."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, Response
from tinker import types as sdk
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest

from corerl.errors import CorerlError, UserError
from corerl.messages import message_of, short_repr
from corerl.rollout import EventLoop
from corerl_tinker import wire
from corerl_tinker.losses import Rows
from corerl_tinker.options import ServeOptions
from corerl_tinker.order import Asked, Model, Turns
from corerl_tinker.requests import Fields, Refused, Request, read, require_sampled
from corerl_tinker.sessions import GONE, Failure, Session, Sessions

if TYPE_CHECKING:
    from corerl_tinker.training import ServedPolicy

T = TypeVar("T")

POLL_SECONDS = 40.0  # clients wait 45 s for a response
SWEEP_SECONDS = 10.0
HEARTBEATS_SECONDS = 35.0  # clients send one every 10 s
OF_A_COPY = 10**9  # copies of a sampling client, in other processes, number their requests from a multiple of this
CREATION = ("session_id", "model_seq_id", "user_metadata", "optimizer_config")  # what load_weights has of create_model


class Service:
    """The server without HTTP, within one event loop. Handlers take the request and words of the path, return what is
    answered, and raise Refused. Those that are no coroutines may be called in any thread, and of a model's numbered
    requests in that of the group."""

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
        self._policy, self._options, self._loop, self._notify, self._clock = policy, options, loop, notify, clock
        self.sessions = Sessions(most_bytes=options.memory_mib << 20, notify=notify, clock=clock)
        self._turns = Turns(self._guarded)
        self._model: Model | None = None  # the one that is trained
        self._lost = ""  # why nothing is computed any more; empty: all is well

    async def work(self) -> None:
        """Give up who has gone, until this task is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """End sessions that are silent, and close gaps that nobody fills."""
        for session_id in self.sessions.idle(self._options.idle_minutes * 60):
            self._notify(f"session {session_id} has ended: no heartbeat for {self._options.idle_minutes:g} minutes")
            self._end(session_id)
        if self._model is not None:
            self._model.close_gap()
        self.sessions.forget()

    async def _guarded(self, call: Callable[[], T]) -> T:
        """Call the policy in the thread of the group. An error after which ranks are in an unknown state, or gone, is
        that of all that wait, and of all that come."""

        def guarded() -> T:
            self._require()
            try:
                return call()
            except Exception as error:
                if isinstance(error, UserError) and not self._policy.ended:
                    raise
                if not isinstance(error, CorerlError):
                    traceback.print_exception(error)  # a fault of the server's own
                self._lost = (
                    f"the model is lost: {message_of(error)}; restart `corerl serve`, and resume from the last saved "
                    "state"
                )
                self._notify(self._lost)
                raise Refused(self._lost, category="server") from error

        try:
            return await self._loop.in_caller(guarded)
        finally:
            if self._lost:
                self.sessions.fail_all(Failure(self._lost, "server"))

    def _require(self) -> None:
        """Raise Refused if nothing is computed any more."""
        if self._lost:
            raise Refused(self._lost, category="server")

    # ---- sessions ----------------------------------------------------------------------------------------------------

    async def create_session(self, request: sdk.CreateSessionRequest) -> Fields:
        return {"session_id": self.sessions.begin(), "error_message": self._lost or None}

    async def session_heartbeat(self, request: sdk.SessionHeartbeatRequest) -> Fields:
        self.sessions.of(request.session_id)
        return {}

    async def finish_session(self, session: str) -> None:
        self._end(session)

    def _end(self, session_id: str) -> None:
        if self._model is not None and self._model.session == session_id:
            self._model.run = None  # what is queued is not begun
            self._model = None
            released = asyncio.ensure_future(self._turns.call(self._policy.release))
            released.add_done_callback(lambda each: each.cancelled() or each.exception())  # of which all are told
        self.sessions.end(session_id)

    # ---- a model -----------------------------------------------------------------------------------------------------

    async def create_model(self, wanted: sdk.CreateModelRequest, *, path: str = "", moments: bool = False) -> Fields:
        """Create a model, with the weights of a checkpoint if there is a path, in the place of the one before. Raises
        Refused, and leaves that, for what is not served."""
        session = self.sessions.of(wanted.session_id)
        model_id = f"{session.id}:train:{wanted.model_seq_id}"
        name = f"{model_id}:0"
        found = {"request_id": name, "model_id": model_id}
        if name in session.promises:
            return found
        if not self._lost:  # once all is lost, the promise says so, whoever trained
            self._take_over(session)
        run = self._policy.planned(wanted, model_id=model_id, path=path)
        if self._model is not None:
            self._model.give_up(f"model {self._model.id!r} is given up: its session has created {model_id!r}")
        model = self._model = Model(id=model_id, session=session.id, turns=self._turns, clock=self._clock)

        def create() -> None:
            self._policy.create(run, path, optimizer=moments)
            model.run = run

        async def created() -> Response:
            try:
                await self._turns.call(create)
            finally:
                if model.run is None and self._model is model:
                    model.give_up(f"model {model_id!r} was not created")
                    self._model = None
            kind = "load_weights" if path else "create_model"
            return JSONResponse({"model_id": model_id, "path": path, "type": kind})

        self.sessions.promise(session, name, created, urgent=True)
        return found

    def _take_over(self, session: Session) -> None:
        """End another session that trains, if its client has missed its heartbeats. Raises Refused if it is there."""
        if self._model is None or self._model.session == session.id:
            return
        other = self._model.session
        silent = self.sessions.silent_for(other)
        if silent <= HEARTBEATS_SECONDS:
            raise Refused(
                f"session {other} trains {self._model.id!r}, and this server trains one model at a time; its client "
                f"was there {silent:.0f} s ago; close that client, or try again once it has been silent for "
                f"{HEARTBEATS_SECONDS:.0f} s"
            )
        self._notify(f"session {other} has ended: another one trains, and its client sends no heartbeats")
        self._end(other)

    def _trained(self, model_id: str) -> tuple[Session, Model]:
        """The model of this id, whose session is there."""
        session = self.sessions.of(model_id)
        if self._model is None or self._model.id != model_id:
            now = f"trains {self._model.id!r}" if self._model else "trains none"
            raise Refused(
                f"model {short_repr(model_id, 80)} is not trained here any more; this server {now}", status=404
            )
        return session, self._model

    async def get_info(self, request: sdk.GetInfoRequest) -> Fields:
        run = self._trained(request.model_id)[1].run
        assert run is not None, "clients wait for the request that creates the model"
        return {
            "type": "get_info",
            "model_data": {"model_name": run.base_model, "tokenizer_id": self._options.name},
            "model_id": run.training_run_id,
            "model_name": run.base_model,
            "is_lora": run.is_lora,
            "lora_rank": run.lora_rank,
        }

    async def forward_backward(self, body: bytes) -> Fields:
        message = await asyncio.to_thread(wire.PassMessage.FromString, body)
        model_id, number, forward_only = message.model_id, message.seq_id, message.forward_only
        try:
            rows = await asyncio.to_thread(self._policy.rows, await asyncio.to_thread(wire.read_pass, message))
        except Exception as error:  # in its turn: its number is used up, for which later requests would wait
            rows, refused = None, error if isinstance(error, UserError) else Refused(message_of(error))

        def run(model: Model, passes: Sequence[Rows]) -> Sequence[Response]:
            try:
                if rows is None:
                    raise refused
                found = zip(passes, self._policy.run(passes), strict=True)
                return [wire.pass_answer(*each.done(logprobs)) for each, logprobs in found]
            except UserError as error:
                if not forward_only:
                    model.incomplete = (
                        f"request {number} of this model, a pass of this step, was refused: {error.message}"
                    )
                raise

        return self._numbered(model_id, number, run, rows, key=rows and rows.key, size=rows.size if rows else 0)

    async def in_turn(self, cls: type[Request], handler: Callable[[Model, Request], Fields], fields: Fields) -> Fields:
        """Promise what `handler` answers to a request of a model. What is wrong with it is found in its turn, and its
        number used up, for which later requests would wait."""
        return self._numbered(
            fields["model_id"], fields["seq_id"], lambda model, _: [JSONResponse(handler(model, read(cls, fields)))]
        )

    def _numbered(
        self,
        model_id: str,
        number: int,
        work: Callable[[Model, Sequence[Any]], Sequence[Response]],
        what: Any = None,
        *,
        key: Hashable = None,
        size: int = 0,
    ) -> Fields:
        """Promise what `work` answers in its turn, after requests of lower numbers, to this and all that is done
        together with it."""
        session, model = self._trained(model_id)
        name = f"{model_id}:{number}"
        found = {"request_id": name, "model_id": model_id}
        if name in session.promises:
            return found
        if number < model.next:
            raise Refused(f"the answer to request {number} of model {model_id!r} is forgotten", status=GONE)

        def of_model(asked: Sequence[Any]) -> Sequence[Response]:
            if model.run is None:  # or another one would be trained
                raise Refused(f"model {model.id!r} was not created: request {model.id}:0 was refused")
            return work(model, asked)

        asked = Asked(what, of_model, key)
        self.sessions.promise(session, name, lambda: asked.answer, size=size, urgent=number == model.next)
        model.add(number, asked)
        return found

    def optim_step(self, model: Model, request: sdk.OptimStepRequest) -> Fields:
        if not isinstance(params := request.optim_params, sdk.AdamParams):
            raise Refused(f"the optimizer {params.type!r} is not served; use AdamParams")
        if model.incomplete:
            why, model.incomplete = model.incomplete, ""
            self._policy.discard()
            raise Refused(f"the step was not taken, and its gradients are dropped; {why}")
        metrics = self._policy.step(params)
        return {"metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}}

    def save_weights(self, model: Model, request: sdk.SaveWeightsRequest) -> Fields:
        return {"path": self._policy.save(request).tinker_path, "type": "save_weights"}

    def load_weights(self, model: Model, request: sdk.LoadWeightsRequest) -> Fields:
        """Into the model that there is."""
        self._policy.load(request.path, optimizer=request.optimizer)
        model.incomplete = ""
        return {"path": request.path, "model_id": model.id, "type": "load_weights"}

    async def create_or_load(self, fields: Fields) -> Fields:
        """`load_weights`, which may be the first request of a new model."""
        if fields.get("session_id") is None:
            return await self.in_turn(sdk.LoadWeightsRequest, self.load_weights, fields)
        request = read(sdk.LoadWeightsRequest, fields)
        run, _ = await asyncio.to_thread(self._policy.checkpoints.find, request.path)
        given = {name: fields[name] for name in CREATION if fields.get(name) is not None}
        wanted = read(sdk.CreateModelRequest, {**given, "base_model": request.base_model or run.base_model})
        return await self.create_model(wanted, path=request.path, moments=request.optimizer)

    def save_for_sampler(self, model: Model, request: sdk.SaveWeightsForSamplerRequest) -> Fields:
        sampler, session = self._policy.save_for_sampler(request), self.sessions.of(model.id)
        sampler_id = self.sessions.add(session, sampler)
        found = {"path": sampler.model_path} if sampler.model_path else {"sampling_session_id": sampler_id}
        return {**found, "type": "save_weights_for_sampler"}

    # ---- samplers ----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: sdk.CreateSamplingSessionRequest) -> Response:
        session, path = self.sessions.of(request.session_id), request.model_path
        if path is not None:
            await asyncio.to_thread(self._policy.checkpoints.find, path)

        async def create() -> Response:
            sampler = await self._turns.call(lambda: self._policy.sampler(path, request.base_model or ""))
            sampler_id = self.sessions.add(session, sampler)
            return JSONResponse({"sampling_session_id": sampler_id, "type": "create_sampling_session"})

        name = f"{session.id}:sample:{request.sampling_session_seq_id}"
        promise = self.sessions.promise(session, name, create, urgent=True)
        answer = await self.sessions.wait(name, promise, POLL_SECONDS)
        if isinstance(answer, Failure):
            raise Refused(answer.sentence)
        return answer

    async def get_sampler(self, sampler: str) -> Fields:
        _, found = self.sessions.sampler(sampler)
        return {"sampler_id": sampler, "base_model": found.base_model, "model_path": found.model_path}

    async def asample(self, fields: Fields) -> Fields:
        request, sampler_id = read(sdk.SampleRequest, fields), fields["sampling_session_id"]
        session, sampler = self.sessions.sampler(sampler_id)
        name = f"{sampler_id}:{request.seq_id}"
        require_sampled(request, fields["sampling_params"])

        async def drawn() -> Response:
            self._require()
            return wire.sample_answer(request, await self._policy.draw(sampler, request, self._turns.ask))

        tokens = request.num_samples * request.prompt.length  # engines are sent the prompt once for each sample
        self.sessions.promise(session, name, drawn, size=8 * tokens)
        return {
            "request_id": name,
            "sample_sequence_ids": [f"{name}:{number}" for number in range(request.num_samples)],
        }

    # ---- promises ----------------------------------------------------------------------------------------------------

    async def retrieve_future(self, request: sdk.FutureRetrieveRequest) -> Response:
        name = request.request_id
        session = self.sessions.of(name, status=404)
        if (promise := session.promises.get(name)) is not None:
            return await self.sessions.wait(name, promise, POLL_SECONDS)
        # A client asks again, under the same number of a model, or another one of a sampler.
        raise Refused(
            f"request {short_repr(name, 80)} is not known, or its answer was fetched, and is forgotten", status=GONE
        )

    async def retrieve_futures(self, request: FuturesRetrieveRequest) -> Fields:
        """Which requests of a sampler are done; their answers are fetched one by one."""
        sampler_id, cursor = request.target.sampling_session_id, request.prev_cursor
        session, _ = self.sessions.sampler(sampler_id)

        def of_client(name: str) -> bool:
            sampler, _, number = name.rpartition(":")
            return sampler == sampler_id and int(number) // OF_A_COPY == request.target.cloned_sampler_id

        for name in request.retrieved_request_ids:
            self.sessions.fetched(session, name)
        seconds = POLL_SECONDS if request.timeout is None else min(request.timeout, POLL_SECONDS)
        done = await session.done_after(cursor, of_client, seconds)
        sizes = {name: {"response_payload_uncompressed_size": promise.size} for name, promise in done.items()}
        return {
            "completions": [{"request_id": name, "state": "finished", **size} for name, size in sizes.items()],
            "cursor": max([cursor, *(promise.number for promise in done.values())]),
        }

    # ---- checkpoints and the server ----------------------------------------------------------------------------------

    def training_run(self, run: str) -> sdk.TrainingRun:
        return self._policy.checkpoints.run(run)

    def checkpoints(self, run: str) -> Fields:
        return {"checkpoints": self._policy.checkpoints.of(run)}

    def weights_info(self, fields: Fields) -> Fields:
        run, _ = self._policy.checkpoints.find(fields["tinker_path"])
        return run.model_dump(include={"base_model", "is_lora", "lora_rank"})

    def delete_checkpoint(self, run: str, checkpoint: str) -> None:
        self._policy.checkpoints.delete(f"tinker://{run}/{checkpoint}")

    def expire_checkpoint(self, fields: Fields, run: str, checkpoint: str) -> None:
        self._policy.checkpoints.expire(f"tinker://{run}/{checkpoint}", ttl=fields.get("ttl_seconds"))

    def capabilities(self) -> Fields:
        longest = self._policy.context_length or None  # None: unlimited
        about = {"max_context_length": longest, "trainable": True, "sampleable": True}
        names = (self._options.name, *self._options.aliases)
        return {"supported_models": [{"model_name": name, **about} for name in names]}
