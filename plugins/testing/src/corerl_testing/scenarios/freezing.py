"""Pass samples through a role that is never trained, and note what is refused and held."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from corerl.backend import StateKey
from corerl.config import ClusterInfo
from corerl.models import hf_config, meta_model, size_of
from corerl.plugin import Kind, load
from corerl.types import ForwardResult, MemoryKind, SleepResult
from corerl_testing.harness import Setup, error_of, forward, make_samples, running, step_at, train
from corerl_testing.inprocess import InProcessSender
from corerl_testing.scenarios.sleeping import alive, resident


@frozen(kw_only=True)
class Unmoved:
    frozen: ForwardResult
    trained: ForwardResult  # of a role that is trained, with the same weights
    precisions: set[str]  # of the parameters
    refused: Mapping[str, str]  # verb -> error
    after_refusals: ForwardResult
    slept: SleepResult
    asleep: int  # bytes of parameters meanwhile
    after_waking: ForwardResult
    parameters: int  # bytes
    predicted: int | None  # the same as the spec predicts them; None if it predicts no memory
    held: int  # bytes of all that the role has, at the end


def freeze(setup: Setup, directory: str) -> Unmoved:
    samples = make_samples(7)
    with running(setup) as worker:  # first: what a process keeps from then on is there before the frozen role is
        trained = forward(worker, setup, samples)
    del worker
    before = alive()
    with running(evolve(setup, frozen=True)) as worker:

        def passed() -> ForwardResult:
            return forward(worker, setup, samples)

        first = passed()
        sender = InProcessSender(lambda bucket: None)
        refused = {
            "forward_backward": error_of(lambda: train(worker, setup, 0)),
            "save": error_of(lambda: worker.save(directory, step_at(0), False)),
            "update_weights": error_of(lambda: worker.host.update_weights(sender=sender, version=1)),
        }
        after_refusals, parameters = passed(), resident(worker, MemoryKind.PARAM)
        slept = worker.sleep(frozenset(MemoryKind))
        asleep = resident(worker, MemoryKind.PARAM)
        worker.wake_up({MemoryKind.PARAM})
        after_waking = passed()
        views = [chunk.view for chunk in worker.backend.local_state(StateKey.PARAM)]
        precisions = {str(view.dtype).removeprefix("torch.") for view in views}
        predicted, config = None, worker.backend.config
        if (memory := load(Kind.BACKENDS, setup.backend).spec.memory) is not None:
            hf = hf_config(config.model)
            ranks = worker.backend.context.world_size
            cluster = ClusterInfo(device=setup.device, ranks=ranks, model=hf.to_dict(), train=config.train, frozen=True)
            predicted = memory(config.options, cluster, size_of(meta_model(hf))).kinds[MemoryKind.PARAM]
        held = alive() - before
    return Unmoved(
        frozen=first,
        trained=trained,
        precisions=precisions,
        refused=refused,
        after_refusals=after_refusals,
        slept=slept,
        asleep=asleep,
        after_waking=after_waking,
        parameters=parameters,
        predicted=predicted,
        held=held,
    )
