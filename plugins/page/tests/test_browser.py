"""The page in headless Chromium, on real runs: `make test-page`. Two of them are bad, and the page must say why."""

from __future__ import annotations

import json
import os
import re
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
SIGNED, VALUES = "own/signed", (-100.0, 0.0, 0.01, 1.0, 100.0)


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
    with (directory / "many" / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, SIGNED: value}) + "\n" for step, value in enumerate(VALUES))
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
    assert re.search(r"[\d,]+ of 5,120 samples \(\d+ %\) are cut off at rollout.max_tokens = 3", cut_off)
    assert (
        "log-probs that differ" in old
        and "engine-1 alone computes other log-probs" in old
        and "resume from a checkpoint" in old
    )
    assert "log-probs that differ" not in good and "cut off" not in good
    assert "key=" not in page.url


def test_samples_of_the_engine_with_old_weights_are_shown_alone(page: Any) -> None:
    page.get_by_role("button", name="see samples").last.wait_for()
    page.locator(".card").nth(2).get_by_role("button", name="see samples").first.click()
    text = page.locator(".counts", has_text="differ from the trainer").inner_text()
    far, whole, of_first, of_second = map(
        int, re.findall(r"(\d+) of (\d+) \(\d+ %\) differ.*: engine-0 0 of (\d+), engine-1 \d+ of (\d+)", text)[0]
    )
    assert (whole, of_first + of_second) == (64, 64) and 16 <= far <= of_second
    playwright.expect(page.locator(".line .marks").first).to_contain_text("engine-1")
    page.locator(".token.far").first.hover()
    playwright.expect(page.locator(".readout")).to_contain_text(re.compile(r"sampled with .* by engine-1 · trainer"))
    page.get_by_label("Engine", exact=True).select_option("0")
    playwright.expect(page.locator(".list")).to_have_attribute("aria-label", f"{of_first} samples")
    assert "engine=0" in page.url and page.locator(".line .bad", has_text="Δ").count() == 0
    page.get_by_label("Engine", exact=True).select_option("1")
    playwright.expect(page.locator(".list")).to_have_attribute("aria-label", f"{of_second} samples")
    playwright.expect(page.locator(".counts .bad")).to_have_text(
        re.compile(r"differ from the trainer by more than 0\.1$")
    )
    page.get_by_label("Engine", exact=True).select_option("")
    playwright.expect(page.locator(".list")).to_have_attribute("aria-label", "64 samples")


def test_a_penalty_stands_between_reward_and_advantage(page: Any, server: Server) -> None:
    go(page, "view=samples&run=0&step=0&sort=-truncated")
    page.locator(".sample .tokens").first.wait_for()
    facts = dict(zip(*(page.locator(f".sample dl {part}").all_inner_texts() for part in ("dt", "dd")), strict=True))
    lines = [json.loads(line) for line in (server.runs[0].path / "rollouts.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "sampled" and line["truncated"])
    assert first["shaped"] == pytest.approx(first["reward"] - 1)
    assert facts["reward after overlong penalty"].endswith(f"\u2212 1 = {first['shaped']:.3g}")
    count, mean, std = first["peers"]
    assert facts["rewards of all samples of its prompt, after penalties"].startswith(f"{count} samples: mean ")
    assert first["advantage"] == pytest.approx((first["shaped"] - mean) / (std + 1e-6), abs=2e-3)
    assert float(facts["advantage, mean"]) == pytest.approx(first["advantage"], rel=1e-2)


def test_what_differs_between_runs_is_a_table(page: Any) -> None:
    page.locator(".differences").first.wait_for()
    rows = page.locator(".differences tbody tr").all_inner_texts()
    assert any(row.split()[:4] == ["rollout.max_tokens", "7", "3", "7"] for row in rows)
    page.locator("#runs .run", has_text="cut-off").click()
    page.locator("#runs .run", has_text="many").click()
    page.get_by_text("settings, and the versions they know, are equal").wait_for()


def test_a_logarithmic_axis_drops_no_point(page: Any) -> None:
    for log, says in (("", ""), ("1", "log, linear within ±0.01: there are values of 0 or below")):
        go(page, f"view=curves&metrics={SIGNED}&log={log}")
        playwright.expect(page.locator("figcaption")).to_have_text([f"{SIGNED} {says}".strip()])
        line = page.locator(".chart polyline")
        points = [tuple(map(float, each.split(","))) for each in line.get_attribute("points").split()]
        heights = [y for _, y in points]
        assert len(points) == len(VALUES) and heights == sorted(heights, reverse=True)
        assert (heights[1] - heights[2] > 3) == bool(log)  # pixels between 0 and 0.01
        assert heights[1] == pytest.approx((heights[0] + heights[-1]) / 2, abs=0.2)
    go(page, "view=curves&metrics=rollout/response_length&log=1")
    playwright.expect(page.locator("figcaption")).to_have_text(["rollout/response_length log"])


def test_curves_over_each_other_are_all_seen(page: Any) -> None:
    for metric, dashed in (("rollout/staleness", 2), ("rollout/reward", 0)):  # 0 in all runs, and not
        go(page, f"view=curves&metrics={metric}")
        playwright.expect(page.locator("figcaption")).to_have_text([metric])
        lines = page.locator(".chart polyline")
        lines.nth(2).wait_for(state="attached")
        dashes = [lines.nth(at).get_attribute("stroke-dasharray") for at in range(3)]
        assert (dashes[0], len(set(dashes))) == (None, 1 + dashed), metric


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
            file.write(json.dumps({"step": step, "rollout/reward": step % 8 + 0.25, "time/step": 1.0}) + "\n")
        playwright.expect(page.locator("#runs .run").nth(3)).to_contain_text(f"step {step + 1}")
        playwright.expect(page.locator(".legend").first).to_contain_text(f"many {step % 8 + 0.25}")


def test_a_narrow_window_needs_no_scrolling_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    for view in ("overview", "curves", "samples", "time", "notices"):
        go(page, f"view={view}&run=2")
        page.locator("main > *").first.wait_for()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, view
