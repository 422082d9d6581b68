"""A recipe goes on from its last checkpoint after its server was killed, and after it was killed itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from plugins.tinker.tests.recipes.conftest import Metrics, Recipe, Serving, begin
from plugins.tinker.tests.recipes.test_supervised import NLL, SL_BASIC
from tests.machine import paced

STEPS, EVERY = 15, 4
SAVING = f"{SL_BASIC} save_every={EVERY}"


def until_two_checkpoints(recipe: Recipe) -> Metrics:
    """The steps that it had taken when it was killed."""
    recipe.until(lambda: len(recipe.metrics()) > 2 * EVERY)
    recipe.process.kill()
    recipe.process.wait()
    return recipe.metrics()


def check(before: Metrics, after: Metrics) -> None:
    """The steps after the last checkpoint were taken again, from weights and moments that are those before."""
    assert [step["step"] for step in after] == list(range(STEPS))
    nll = [step[NLL] for step in after]
    again = nll[2 * EVERY]
    assert again < before[2 * EVERY - 2][NLL] < before[0][NLL] - 1.0
    assert nll[-1] < 1.5


def test_a_recipe_goes_on_after_its_server_was_killed(offline: Path) -> None:
    log = "server-killed"
    with Serving(offline) as serving:
        recipe = begin(serving, log, SAVING)
        recipe.until(lambda: len(recipe.metrics()) > 2 * EVERY)
        os.kill(serving.command.process.pid, signal.SIGKILL)
    before = until_two_checkpoints(recipe)
    with Serving(offline) as serving:
        after = begin(serving, log, SAVING, answer="resume").finish(NLL)
    check(before, after)


def test_a_recipe_goes_on_after_it_was_killed(serving: Serving) -> None:
    log = "client-killed"
    before = until_two_checkpoints(begin(serving, log, SAVING))
    refused = begin(serving, log, SAVING, answer="resume")
    assert refused.process.wait(paced(60.0)) != 0
    assert "and this server trains one model at a time; its client was there" in refused.output.read_text()
    serving.command.until(lambda: "has ended: no heartbeat" in serving.command.err, "the killed client is given up")
    check(before, begin(serving, log, SAVING, answer="resume").finish(NLL))
