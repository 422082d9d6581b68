"""The extension: resizes a run's groups between its steps, and goes on without machines that are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from corerl.algorithms import ACTOR
from corerl.config import imported
from corerl.driver import RunGroups
from corerl.errors import ConfigError, CorerlError, InsufficientResources, ResizeFailed, UserError, WorkerDied
from corerl.messages import message_of
from corerl.plan import ENGINES, PlanReady
from corerl.plugin import Event, PlanAnswer, ProcessFailure, RunStarted, StepFinished
from corerl_elastic.changing import resize, restart_by, sizes_of
from corerl_elastic.config import ElasticOptions
from corerl_elastic.fewer import fewer
from corerl_elastic.places import Places
from corerl_elastic.scaling import Answer, Devices, Scaler, Scaling, answer, asked, balance, begin


class Elastic:
    """Answers `corerl scale`, asks the scaler, and finds places where machines are gone."""

    def __init__(self, *, options: ElasticOptions, run_dir: str) -> None:
        self._spare_timeout = options.spare_timeout
        self._run_dir = Path(run_dir)
        self._scaling: Scaling | None = None
        if options.scaler:
            scaler: Scaler = imported(options.scaler, setting="scaler")
            self._scaling = Scaling(name=options.scaler, scaler=scaler)
        self._metrics: list[Mapping[str, float]] = []  # of steps that the scaler's statistics do not have yet
        self._places: Places | None = None

    def plan_ready(self, plan: PlanReady) -> PlanAnswer | None:
        scaling = self._scaling
        if scaling is None or scaling.scaler is not balance or plan.config.run.mode == "eval":  # of such a run
            return None
        if not (cure := needed_by_balance(plan)):
            return None
        problem = (
            f"extensions.elastic.scaler: {scaling.name!r} moves devices, one by one, between ranks and engines that "
            f"have their own; {cure}, or remove it"
        )
        return PlanAnswer(problems=[problem])

    def observe(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            begin(self._run_dir)
        elif isinstance(event, StepFinished) and self._scaling is not None:
            self._metrics.append(event.metrics)

    # ---- between steps ----------------------------------------------------------------------------------------------

    def between_steps(self, run: RunGroups) -> None:
        """Resize the groups if `corerl scale` or the scaler asks for it. A rejected resize is a notice."""
        self._count_steps(run)
        try:
            request = asked(self._run_dir)
        except ConfigError as error:
            run.notice(f"a request for other sizes is ignored: {error.message}")
            request = None
        if request is not None:
            changed: list[str] = []
            failed = "the run was stopped"
            try:
                failed = tried(run, request.overrides, changed)
            except Exception as error:  # such as of ranks that have died, whose successors know of no request
                failed = message_of(error)
                raise
            finally:
                try:
                    answer(self._run_dir, request, Answer(changed=tuple(changed), error=failed))
                except ConfigError as error:
                    run.notice(f"could not write the reply to the resize request: {error.message}")
        if self._scaling is not None:
            self._ask(run, self._scaling)

    def _ask(self, run: RunGroups, scaling: Scaling) -> None:
        try:
            devices = devices_of(run)
        except CorerlError as error:
            run.notice(f"the scaler is not asked after this step: {error.message}")
            return
        try:
            wanted = scaling.wanted(run.step, sizes_of(run), devices)
        except CorerlError as error:
            run.notice(f"{error.message}; it is not asked again")
            self._scaling = None
            return
        if wanted and tried(run, wanted, []):
            scaling.refused(wanted, devices)

    def _count_steps(self, run: RunGroups) -> None:
        """Let the scaler's statistics have the steps since the last call, at whose end the sizes were these."""
        metrics, self._metrics = self._metrics, []
        if self._scaling is not None:
            for each in metrics:
                self._scaling.step_done(each, sizes_of(run))

    # ---- machines that are gone -------------------------------------------------------------------------------------

    def ranks_failed(self, run: RunGroups, failure: ProcessFailure) -> None:
        """Find places for the processes of machines that are gone: where the cluster has put their bundles, or else, in
        smaller groups, on the devices that are left. Ranks that live stay; they are ended, and WorkerDied says so, if
        they are to make room for engines. Raises InsufficientResources if a group cannot be
        so small, or has no place."""
        self._count_steps(run)
        if self._places is None or self._places.pool is not run.pool:
            self._places = Places(run.pool)
        places = self._places
        places.settle(within=self._spare_timeout)
        if not failure.ranks:
            run.require_ranks()  # a machine of theirs may be gone by now
            placement = run.plan.processes.placement
            if places.left(ENGINES, separate=placement.separate) + places.unused < placement.widths.get(ENGINES, 1):
                run.roles[ACTOR].group.processes.kill()
                raise WorkerDied(
                    f"{ACTOR}: its ranks were ended to make room for engines, as no device of theirs is left"
                )
        if not run.lost:
            return
        try:
            plan = fewer(run.plan, places, [*run.roles, *([ENGINES] if run.fleet is not None else [])])
            restart_by(run, plan, staying=[] if failure.ranks else [*run.roles])
        except CorerlError as error:
            raise InsufficientResources(error.message) from error


def needed_by_balance(plan: PlanReady) -> str:
    """What a run must change for `balance` to have a device to move; "" for nothing."""
    config, placement = plan.config, plan.processes.placement
    if not (config.run.has_engines and config.run.trains and config.cluster.placement == "disaggregated"):
        return "set run.mode='train' and cluster.placement='disaggregated'"
    if (width := placement.widths.get(ENGINES, 1)) > 1:
        return f"give each engine one device, where these have {width}"
    return ""


def devices_of(run: RunGroups) -> Devices:
    """Raises CorerlError if Ray does not tell."""
    reserved, unused, free = run.pool.count(run.plan.processes.placement.bundle)
    return Devices(reserved=reserved, unused=unused, free=free)


def tried(run: RunGroups, overrides: Sequence[str], changed: list[str]) -> str:
    """Resize the groups; adds a line to `changed` for each that has changed. Returns why that was rejected, "" if it
    was not."""
    try:
        changed += resize(run, overrides)
    except (UserError, ResizeFailed) as error:
        run.notice(f"resize rejected: {'; '.join(error.message.splitlines())}")
        return error.message
    return ""
