"""HTTP for the page: its files, and what runs' directories hold as JSON. It only reads; every route is a GET.

    /                                     the page and its files, for whoever asks
    /api/runs                             [{name, path, running, steps, done, changed, files}]
    /api/differences?runs=0,2             [{name, values: [text or null, one for each run]}]
    /api/runs/R/metrics?names=A,B         {names: [...], series: {A: {steps: [...], values: [number or null, ...]}}}
    /api/runs/R/findings                  [{level, what, why, fix, metric, view}]
    /api/runs/R/steps                     [{step, kinds: {sampled: 64}}]
    /api/runs/R/samples?step=&kind=&engine=&offset=&limit=&sort=&q=
                                          {total, cut_off, far, bad: {cut_off, far}, engine, engines: [of each],
                                          samples: [summary]}; `bad` is what findings call so, and
                                          `engine` only chooses where it sampled any of the step, and is null elsewhere
    /api/runs/R/samples/ID                a line of rollouts.jsonl or samples.jsonl; ?step= says of which file
    /api/runs/R/timeline?from=&to=&width= {from, to, of, tracks: [{process, track, slices}]}, in microseconds
    /api/runs/R/processes                 [{process, state, last, ended, calls, busy, seconds, idle, errors}]
    /api/runs/R/notices                   [{step, text}]
    /api/runs/R/config                    config.toml

R is a run's number. Everything under /api wants the key of the address that was printed, in the header X-Key.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import asdict
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from corerl.messages import one_line, shorten
from corerl_page.differences import differences
from corerl_page.findings import CUT_OFF, FEW, bound_of, findings
from corerl_page.runs import FAR, Gone, Run, by_engine, is_running, mean_diff

STATIC = Path(__file__).parent / "static"
MOST = 500  # samples of one answer
ORDERS = ("", "reward", "-reward", "-advantage", "advantage", "-tokens", "-diff", "-truncated", "engines")
# Nothing is loaded from elsewhere, and nothing of what a model wrote is run.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Refused(Exception):
    def __init__(self, sentence: str, *, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


def app(runs: Sequence[Run], *, key: str, hosts: Collection[str] = ()) -> Starlette:
    """Answers under the names `hosts`, localhost or an IP address."""
    names = {"localhost", *(host.lower() for host in hosts)}

    def of_run(answer: Callable[[Run, Request], Any]) -> Callable[[Request], Any]:
        def found(request: Request) -> Any:
            number = request.path_params["run"]
            if number >= len(runs):
                raise Refused(f"there is no run {number}; the page shows {len(runs)}", status=404)
            return answer(runs[number], request)

        return found

    def route(path: str, answer: Callable[[Request], Any]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                _check_host(request, names)
                _check_key(request, key)
                return JSONResponse(await run_in_threadpool(answer, request), headers=HEADERS)
            except Refused as refused:
                return JSONResponse({"error": str(refused)}, refused.status, headers=HEADERS)
            except Gone as error:
                return JSONResponse({"error": str(error)}, 404, headers=HEADERS)
            except (OSError, ValueError) as error:  # a file of the run that cannot be read
                return JSONResponse({"error": f"cannot read the run: {one_line(error)}"}, 500, headers=HEADERS)

        return Route(f"/api/{path}", endpoint)

    async def page(request: Request) -> Response:
        try:
            _check_host(request, names)
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status, headers=HEADERS)
        file = STATIC / (request.path_params.get("file") or "index.html")
        if file not in STATIC.iterdir():
            return JSONResponse({"error": f"{shorten(request.url.path, 200)} is not served here"}, 404, headers=HEADERS)
        return FileResponse(file, headers=HEADERS)

    def differing(request: Request) -> list[dict[str, Any]]:
        wanted = {each.strip() for each in request.query_params.get("runs", "").split(",")}
        return [asdict(each) for each in differences([run for at, run in enumerate(runs) if str(at) in wanted])]

    run = "runs/{run:int}"
    return Starlette(
        routes=[
            route("runs", lambda _: [each.state() for each in runs]),
            route("differences", differing),
            route(f"{run}/metrics", of_run(_metrics)),
            route(f"{run}/findings", of_run(_findings)),
            route(f"{run}/steps", of_run(lambda run, _: run.steps())),
            route(f"{run}/samples", of_run(_samples)),
            route(f"{run}/samples/{{id:int}}", of_run(_sample)),
            route(f"{run}/timeline", of_run(_timeline)),
            route(f"{run}/processes", of_run(lambda run, _: run.timeline.processes())),
            route(f"{run}/notices", of_run(lambda run, _: run.notices())),
            route(f"{run}/config", of_run(lambda run, _: run.config())),
            Route("/", page),
            Route("/{file}", page),
        ]
    )


def _metrics(run: Run, request: Request) -> dict[str, Any]:
    series = {}
    for name, values in run.metrics(request.query_params.get("names", "").split(",")).items():
        points = sorted(values.items())
        series[name] = {"steps": [step for step, _ in points], "values": [value for _, value in points]}
    return {"names": run.names(), "series": series}


def _findings(run: Run, request: Request) -> list[dict[str, Any]]:
    metrics, running = run.metrics(run.names()), is_running(run.path)
    found = findings(metrics, run.config(), run.sampled(FEW), run.diffs(), running=running)
    return [asdict(each) for each in found]


def _samples(run: Run, request: Request) -> dict[str, Any]:
    step, kind = _number(request, "step"), request.query_params.get("kind", "sampled")
    offset, limit = _number(request, "offset", 0), min(_number(request, "limit", 100), MOST)
    order, text = request.query_params.get("sort", ""), request.query_params.get("q", "")
    if order not in ORDERS:
        raise Refused(f"sort={shorten(order, 40)!r}, expected one of {', '.join(ORDERS[1:])}")
    samples = run.samples(step)
    found = samples.of(step, kind)
    engines = by_engine(found)
    engine = _number(request, "engine") if "engine" in request.query_params else None
    if engine not in {each.engine for each in engines}:  # as among held-out samples, whose engines are unknown
        engine = None
    if engine is not None:
        found = [each for each in found if engine in each.engines]
    if text:
        found = samples.matching(found, text)
    if name := order.lstrip("-"):
        sign = -1 if order.startswith("-") else 1
        # Those without the number come last.
        values = {each.id: getattr(each, name) for each in found}
        if name == "engines":
            values = {number: engines[0] if engines else None for number, engines in values.items()}
        found.sort(key=lambda each: (values[each.id] is None, sign * (values[each.id] or 0)))
    cut_off = sum(bool(each.truncated) for each in found)
    diffs = [mean_diff(found), *(each.diff for each in by_engine(found))]
    return {
        "total": len(found),
        "cut_off": cut_off,
        "far": sum((each.diff or 0) > FAR for each in found),
        "bad": {
            "cut_off": cut_off >= CUT_OFF * len(found) > 0,
            "far": max(each or 0.0 for each in diffs) > bound_of(run.config()),
        },
        "engine": engine,
        "engines": [asdict(each) for each in engines],
        "samples": [asdict(each) for each in found[offset : offset + limit]],
    }


def _sample(run: Run, request: Request) -> dict[str, Any]:
    return run.samples(_number(request, "step")).record(request.path_params["id"])


def _timeline(run: Run, request: Request) -> dict[str, Any]:
    first, last = request.query_params.get("from"), request.query_params.get("to")
    return run.timeline.window(
        None if first is None else _number(request, "from"),
        None if last is None else _number(request, "to"),
        width=max(1, min(_number(request, "width", 1200), 10_000)),
    )


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Refused(f"{name}={shorten(str(text), 40)!r}, expected a whole number that is at least 0")
    return int(text)


def _check_host(request: Request, names: Collection[str]) -> None:
    # A web page whose name is made to lead here has that name as host: no such name is an IP address.
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:  # brackets without an address
        host = ""
    if host not in names and not _is_address(host):
        raise Refused(f"this page is not called {shorten(host, 200)!r}; name it with --host-name", status=403)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_key(request: Request, key: str) -> None:
    given = request.headers.get("x-key", "").encode("latin-1")
    if not hmac.compare_digest(given, key.encode()):
        raise Refused("the key is missing or another one; open the address that `corerl view` printed", status=401)
