"""What an extension on the driver may read and change of a run: the argument of `between_steps` and `ranks_failed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from corerl.plan.plan import Plan


@frozen(kw_only=True)
class Failure:
    """Processes that have ended, and are about to be replaced."""

    message: str  # which process, and why
    ranks: bool  # True: the ranks of all roles are started again, from the newest checkpoint; False: engines alone
    lost: Mapping[str, int]  # "engines" or a role -> how many of its processes were on a machine that is gone


class RunControl(Protocol):
    """A run, as `between_steps` and `ranks_failed` get it; valid during the call."""

    @property
    def step(self) -> int:
        """Rollout steps done."""

    @property
    def plan(self) -> Plan:
        """Of the groups as they are; `plan.record` is its config as plain data."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Ranks by role, and replicas, under the names of their settings: roles.actor.ranks, rollout.replicas."""

    def replan(self, overrides: Sequence[str]) -> Plan:
        """The plan with overrides of sizes, layouts and backends, such as "roles.actor.ranks=4". Changes nothing.
        Raises UserError for other settings, and for all that is wrong with these."""

    def apply(self, plan: Plan) -> list[str]:
        """Let the groups be as `plan` says; returns a line for each that has changed, which is also a notice.

        In `between_steps`, ranks go on with the state that they have, and engines are started or ended. Raises
        ResizeFailed or UserError where a group could not be changed: then it is as before, and the run may go on; and
        WorkerDied if ranks die, which `between_steps` lets pass: the run then goes on from its newest checkpoint.

        In `ranks_failed` nothing is started yet: what is about to start does so by this plan, on the devices that are
        left. Raises CorerlError if there are too few."""

    def notice(self, text: str) -> None:
        """Report a sentence that the user should read."""

    def request_stop(self) -> None:
        """Let the run end as a first SIGINT does: saved, as soon as another one can go on from there."""
