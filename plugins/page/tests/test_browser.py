"""The page in headless Chromium, on real runs: `make test-page`. Two of them are bad, and the page must say why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from corerl_page.server import Server
from plugins.page.tests.prepared import RUNS, prepare

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH; install it, or name it in CHROMIUM"),
]
STEPS, MANY = 12, 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On the good run, the two bad ones, and a step of many samples."""
    directory = tmp_path_factory.mktemp("runs")
    runs = [prepare(directory, name, f"run.steps={STEPS}", "eval.every=0") for name in RUNS]
    (directory / "many").mkdir()
    one = json.loads((runs[0] / "rollouts.jsonl").read_text().splitlines()[0])
    with (directory / "many" / "rollouts.jsonl").open("w") as file:
        for number in range(MANY):
            file.write(json.dumps({**one, "step": 0, "number": number, "response": f"answer {number}"}) + "\n")
    served = Server([*runs, directory / "many"])
    served.start()
    yield served
    served.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(params=["light", "dark"])
def page(browser: Any, server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opened, in both colour schemes; it may neither fail nor ask another server."""
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1280, "height": 900})
    opened, wrong = context.new_page(), list[str]()
    own = server.url.partition("#")[0]
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda asked: None if asked.url.startswith((own, "data:")) else wrong.append(asked.url))
    opened.goto(server.url)
    yield opened
    context.close()
    assert wrong == []


def go(page: Any, fragment: str) -> None:
    page.evaluate("fragment => { location.hash = fragment }", fragment)


def test_the_overview_says_why_the_bad_runs_are_bad(page: Any) -> None:
    cards = page.locator(".card")
    cards.nth(3).wait_for()
    good, cut_off, old = (cards.nth(at).inner_text() for at in range(3))
    assert "of samples are cut off at rollout.max_tokens = 3" in cut_off
    assert "log-probs that differ" in old and "only some engines do" in old
    assert "log-probs that differ" not in good and "cut off" not in good
    assert "key=" not in page.url


def test_half_of_the_samples_are_of_the_engine_with_old_weights(page: Any) -> None:
    page.get_by_role("button", name="see samples").last.wait_for()
    cards = page.locator(".card")
    cards.nth(2).get_by_role("button", name="see samples").first.click()
    text = page.locator(".bar b", has_text="differ from the trainer").inner_text()
    far = int(text.split(" differ")[0].split(" of ")[-2].split()[-1])
    assert 16 <= far <= 48
    assert page.locator(".line .bad", has_text="Δ").first.is_visible()
    page.locator(".token.far").first.hover()
    assert "trainer" in page.locator(".readout").inner_text()


def test_a_click_on_a_curve_opens_its_run(page: Any) -> None:
    go(page, "view=curves&metrics=rollout/logprob_diff&run=0")
    chart = page.locator(".chart svg")
    chart.locator("polyline").nth(2).wait_for()
    x, y = chart.locator("polyline").nth(2).get_attribute("points").split()[-1].split(",")
    chart.click(position={"x": float(x) - 1, "y": float(y) + 3})
    page.locator(".line .reward").first.wait_for()
    assert "run=2" in page.url and f"step={STEPS - 1}" in page.url


def test_keys_lead_everywhere(page: Any) -> None:
    page.locator(".card").first.wait_for()
    page.keyboard.press("3")
    page.locator(".sample .tokens").first.wait_for()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator(".readout")).to_contain_text("engine")
    step = page.get_by_label("Step", exact=True)
    last = int(step.input_value())
    page.keyboard.press("k")
    playwright.expect(step).to_have_value(str(last - 1))
    page.keyboard.press("j")
    playwright.expect(step).to_have_value(str(last))
    page.keyboard.press("ArrowDown")
    playwright.expect(page.locator(".line").nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("/")
    playwright.expect(page.get_by_label("Search samples")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    theme = page.locator("html").get_attribute("data-theme")
    page.keyboard.press("t")
    assert {theme, page.locator("html").get_attribute("data-theme")} == {"light", "dark"}


def test_every_view_shows_its_run(page: Any) -> None:
    go(page, "view=curves&metrics=rollout/reward,train/entropy")
    playwright.expect(page.locator("figcaption")).to_have_text(["rollout/reward", "train/entropy"])
    playwright.expect(page.locator(".chart").first.locator("polyline")).to_have_count(3)
    go(page, "view=time&run=0")
    page.locator(".timeline canvas").wait_for()
    playwright.expect(page.locator("caption")).to_have_text("Idle share of the whole run")
    go(page, "view=processes&run=2")
    playwright.expect(page.locator("tbody th")).to_have_text(["actor rank 0", "actor rank 1", "engine-0", "engine-1"])
    go(page, "view=notices")
    assert "cannot report what it has loaded" in page.locator(".notices").inner_text()


def test_many_samples_scroll_without_lag(page: Any) -> None:
    go(page, "view=samples&run=3&step=0")
    page.locator(".line .reward").first.wait_for()
    frames = page.evaluate(
        """async () => {
            const list = document.querySelector(".list"), frames = [];
            for (let at = 0, last = performance.now(); at < 100; at++) {
                list.scrollTop = at * 5600;
                await new Promise(requestAnimationFrame);
                frames.push(performance.now() - last);
                last = performance.now();
            }
            return frames.sort((one, other) => one - other);
        }"""
    )
    assert frames[50] < 50  # milliseconds, with a wide margin for machines that do other things too
    page.locator(".line", has_text="answer 9900").wait_for()
    assert page.locator(".list .line").count() < 60


def test_the_page_follows_a_run_that_goes_on(page: Any, server: Server) -> None:
    page.locator(".card").nth(3).wait_for()
    path = server.runs[3].path / "metrics.jsonl"
    path.touch()
    before = len(path.read_text().splitlines())
    for step in range(before, before + 3):
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "rollout/reward": step + 0.25, "time/step": 1.0}) + "\n")
        playwright.expect(page.locator("#runs .run").nth(3)).to_contain_text(f"step {step + 1}")
        playwright.expect(page.locator(".legend").first).to_contain_text(f"many {step + 0.25}")


def test_a_narrow_window_needs_no_scrolling_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    for view in ("overview", "curves", "samples", "time", "notices"):
        go(page, f"view={view}&run=2")
        page.locator("main > *").first.wait_for()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, view
