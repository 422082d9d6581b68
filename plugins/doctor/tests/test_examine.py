"""What the doctor finds, with its cure, and that nothing it looks at can end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corerl.config import load_config
from corerl.errors import PluginNotFound
from corerl.plugin import Finding, Kind, Level, load
from corerl_doctor import installation
from corerl_doctor.advice import of_learning
from corerl_doctor.child import run_check
from corerl_doctor.examine import examine
from corerl_doctor.installation import driver
from corerl_doctor.plugins import check_joining, check_named, finding_of
from tests.end_to_end.command import write_small
from tests.plugin.conftest import Install

pytestmark = pytest.mark.processes
forked = pytest.mark.usefixtures("forked_python")

SPEC = """
from attrs import frozen
from corerl.plugin import BackendSpec, Finding, Level

@frozen(kw_only=True)
class Options:
    pass

def probe():
    {probe}

SPEC = BackendSpec(
    implementation="{code}", config=Options, api=(2, 0), summary="amiss", probe=probe,
    environment=lambda options, cluster: {{"MINE_RANKS": str(cluster.ranks)}},
)
"""
PLAIN = "corerl_testing.plain.backend:PlainBackend"


def spec(*, probe: str = "return ()", code: str = PLAIN) -> str:
    """Source of a module with a SPEC."""
    return SPEC.format(probe=probe, code=code)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On sys.path, and so on the doctor's."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    return directory


def amiss(findings: list[Finding]) -> list[Finding]:
    for finding in findings:
        if finding.level is not Level.OK:
            assert finding.why and finding.fix, finding
    return [finding for finding in findings if finding.level is not Level.OK]


def test_without_a_name_no_process_imports_torch(install: Install) -> None:
    program = "import sys\nfrom corerl_doctor.examine import examine\nassert list(examine())\n"
    program += "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    # Nor does the process that a plugin is looked at in: this one would say so.
    loud = spec().replace("from attrs", "import sys\nassert 'torch' not in sys.modules\nfrom attrs")
    install("corerl-light", {"backends": {"light": "light_spec:SPEC"}}, light_spec=loud)
    assert amiss(list(examine())) == []


@forked
def test_an_implementation_that_aborts_is_found_by_name(install: Install) -> None:
    modules = {"native_spec": spec(code="native_code:Backend"), "native_code": "import os\nos.abort()\n"}
    site = install("corerl-native", {"backends": {"native": "native_spec:SPEC"}}, **modules)
    (finding,) = amiss(list(examine("native")))
    assert finding.what == (
        "importing native_code:Backend, the implementation of backend 'native' (corerl-native 0.1.0), killed its "
        f"process with SIGABRT at {site}/native_code.py:2"
    )


@forked
def test_a_named_backend_is_checked_in_full(install: Install) -> None:
    probe = 'yield Finding(level=Level.WARNING, what="an old driver", why="it is slow", fix="apt upgrade")'
    install("corerl-tried", {"backends": {"tried": "tried_spec:SPEC"}}, tried_spec=spec(probe=probe))
    findings = list(examine("tried"))
    assert amiss(findings) == [Finding(level=Level.WARNING, what="an old driver", why="it is slow", fix="apt upgrade")]
    told = [finding.what for finding in findings]
    tried = "backend 'tried' (corerl-tried 0.1.0): "
    assert [text.removeprefix(tried) for text in told if text.startswith(tried)] == [
        "tried_spec:SPEC loads, written for API 2.0",
        "corerl_testing.plain.backend:PlainBackend can be imported",
        "its hooks meet the contract",
        "by default its processes get MINE_RANKS=1",
    ]
    assert any(text.startswith("torch ") for text in told)


@forked
def test_failing_probes_and_wrong_hooks_are_errors(install: Install) -> None:
    install(
        "corerl-tried",
        {"backends": {"tried": "tried_spec2:SPEC"}},
        tried_spec2=spec(probe="raise OSError('no libcudart')", code="tried_code2:Backend"),
        tried_code2="from corerl_testing.plain.backend import PlainBackend\n"
        "class Backend(PlainBackend):\n    def forward_backward(self, *batch):\n        pass\n",
    )
    hooks, probe = amiss(list(examine("tried")))
    assert hooks.what.startswith("backend:tried implements forward_backward(*batch) for forward_backward(batch, loss,")
    assert probe.what == "the probe of backend 'tried' (corerl-tried 0.1.0) raised OSError: no libcudart"


@forked
def test_each_unusable_plugin_comes_with_its_fix(install: Install) -> None:
    sources = {
        "bad": "import a_library_that_is_not_there",
        "later": spec().replace("(2, 0)", "(3, 0)"),
        "older": spec().replace("(2, 0)", "(0, 3)"),
    }
    for name, source in sources.items():
        install(f"corerl-{name}", {"backends": {name: f"{name}_spec:SPEC"}}, **{f"{name}_spec": source})
    for name in ("one", "two"):
        install(name, {"backends": {"both": "both_spec:SPEC"}}, both_spec=spec())
    fixes = [(finding.what.split("'")[1], finding.level.value, finding.fix) for finding in amiss(list(examine()))]
    assert fixes == [
        ("both", "warning", "python -m pip uninstall two; or write 'one:both' in the config"),
        ("bad", "error", "python -m pip install --force-reinstall corerl-bad"),
        ("later", "error", "python -m pip install --upgrade corerl"),
        ("older", "error", "python -m pip install --upgrade corerl-older"),
    ]
    offered, refused = amiss(list(examine("both")))
    assert (offered.level, refused.level) == (Level.WARNING, Level.ERROR)
    assert refused.what.startswith("backend 'both' is provided by one 0.1.0 and two 0.1.0; choose one by writing ")
    (unknown,) = amiss(list(examine("latter")))
    assert unknown.what == "unknown plugin 'latter'; did you mean 'later'?"
    assert unknown.fix == "corerl plugins, which lists the names that are installed"


def test_a_missing_backend_is_fixed_by_its_extra(absent_backend: str) -> None:
    with pytest.raises(PluginNotFound) as caught:
        load(Kind.BACKENDS, absent_backend)
    assert finding_of(caught.value, Kind.BACKENDS, absent_backend).fix == "pip install 'corerl[absent]'"


@forked
def test_a_distribution_installed_twice_is_reported_with_both_places(install: Install) -> None:
    points = {"backends": {"tried": "tried_spec3:SPEC"}}
    site = install("corerl-tried", points, version="0.2", tried_spec3=spec())
    stale = install("corerl-tried", {}, version="0.1", site="stale")
    (finding,) = amiss(list(examine()))
    assert finding.level is Level.WARNING
    places = (f"0.1 in {stale}/corerl_tried-0.1.dist-info", f"0.2 in {site}/corerl_tried-0.2.dist-info")
    assert finding.what == f"corerl-tried is installed 2 times: {', '.join(places)}"
    assert finding.fix.startswith("python -m pip uninstall -y corerl-tried")


@forked
def test_entry_points_edited_after_installation_are_reported(install: Install, tmp_path: Path) -> None:
    project = tmp_path / "tried"
    project.mkdir()
    points = '[project.entry-points."corerl.backends"]\ntried = "tried_spec4:NEW"\n'
    (project / "pyproject.toml").write_text(f'[project]\nname = "corerl-tried"\n{points}')
    site = install("corerl-tried", {"backends": {"tried": "tried_spec4:SPEC"}}, tried_spec4=spec())
    url = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (site / "corerl_tried-0.1.0.dist-info/direct_url.json").write_text(json.dumps(url))
    findings = amiss(list(examine()))
    assert [finding.what for finding in findings] == [
        f"corerl-tried is installed in place from {project}, and tried = tried_spec4:{attribute} of corerl.backends is "
        f"{where} its pyproject.toml"
        for attribute, where in (("NEW", "only in"), ("SPEC", "no longer in"))
    ]
    assert {finding.fix for finding in findings} == {f"python -m pip install --no-deps -e {project}"}


def test_a_library_that_cannot_be_imported_is_named(site: Path) -> None:
    (site / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    (finding,) = run_check("corerl_doctor.run:devices")
    assert finding.what.startswith("importing corerl_doctor.run raised ImportError: libcudart.so.13: cannot open ")
    assert finding.fix.endswith(" -c 'import corerl_doctor.run'")
    (site / "torch.py").write_text("import os\nos.abort()\n")
    (finding,) = run_check("corerl_doctor.run:devices")
    assert finding.what == f"importing corerl_doctor.run killed its process with SIGABRT at {site}/torch.py:2"


@pytest.mark.parametrize(
    ("shown", "what"),
    [
        ("\n".join(["NVIDIA H200, 143771 MiB, 580.95"] * 2), "2 x NVIDIA H200, 143771 MiB, driver 580.95"),
        ("A card, with a comma, 1 MiB, 1.0", "1 x A card, with a comma, 1 MiB, driver 1.0"),
        ("No devices were found", "1 x No devices were found"),
    ],
)
def test_what_the_driver_says_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, what: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{shown}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(installation, "why_unbuildable", lambda: "")
    assert [finding.what for finding in driver()] == [what]
    monkeypatch.setattr(installation, "why_unbuildable", lambda: "there is no C compiler")
    counted, slow = driver()
    assert (counted.what, slow.what) == (what, "there is no C compiler")
    assert slow.level is Level.WARNING and "1.4 to 2.7 times the kernels' time" in slow.why and "gcc" in slow.fix


@forked
def test_a_config_is_checked_with_its_environment(tmp_path: Path, install: Install) -> None:
    install("corerl-tried", {"backends": {"tried": "tried_spec5:SPEC"}}, tried_spec5=spec())
    file = write_small(tmp_path)
    chosen = ["backend.name=tried", "roles.actor.ranks=1", f"run.dir={tmp_path}/run"]
    notices = list(of_learning(load_config(file, ["algorithm.kl_estimator=k2"])))
    (tmp_path / "notices.jsonl").write_text(json.dumps({"text": notices[0], "step": 0}) + "\n")
    said = [*chosen, "algorithm.kl_estimator=k2", "rollout.top_k=3"]
    findings = list(examine(file=str(file), overrides=said, layers=True, run_dir=str(tmp_path)))
    kept, cut = amiss(findings)
    assert ([kept.what], kept.why) == (notices, "noted by the run with 0 steps done")
    assert cut.what.startswith("rollout.top_k=3: only the likeliest tokens are sampled")
    assert (cut.level, cut.fix) == (Level.WARNING, f"edit {file} if that is not meant")
    assert findings[-1].what.startswith("CoreRL's packed pass and transformers' own agree in all 34 modules ")
    (ranks,) = [finding.what for finding in findings if finding.what.startswith("actor ranks get ")]
    assert {"MINE_RANKS=1", "OMP_NUM_THREADS=1"} <= set(ranks.split())
    assert f"{file} can run: 1 role on cpu" in [finding.what for finding in findings]

    clashing = [*chosen, 'cluster.environment.MINE_RANKS="8"']
    (clash,) = amiss(run_check("corerl_doctor.run:run", str(file), clashing, False, False))
    assert "environment variable MINE_RANKS: cluster.environment needs another value, but tried " in clash.what
    (unknown,) = amiss(
        run_check("corerl_doctor.run:run", str(file), [*clashing, "backends.tried.shards=2"], False, False)
    )
    assert unknown.what.startswith("backends.tried.shards: unknown key")
    assert unknown.fix == f"edit {file}, then: corerl config check {file}"


def test_each_problem_of_a_config_is_an_error(tmp_path: Path) -> None:
    file = write_small(tmp_path)
    findings = amiss(list(examine(file=str(file), overrides=["run.stepps=3", "train.epochs=0"])))
    assert [finding.what.partition(":")[0] for finding in findings] == ["run.stepps", "train.epochs"]
    assert all(finding.fix == f"edit {file}" for finding in findings)


def test_extensions_that_always_join_are_examined_whatever_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []

    def looked(chosen: list[tuple[str, str]]) -> list[Finding]:
        asked.append({name for _, name in chosen})
        return []

    monkeypatch.setattr("corerl_doctor.plugins.check_plugins", looked)
    assert [*check_joining(None), *check_joining(["jsonl", "elastic"])] == []
    joining = {"advice", "forecast"}
    assert asked == [{"console", "jsonl", "tensorboard", "curves", "elastic", *joining}, joining]


def test_an_unmet_requirement_has_its_command(old_tomli_w: str) -> None:
    (finding,) = amiss(list(installation.requirements(["corerl", "corerl-fsdp"])))
    assert f"{finding.what}; {finding.fix}" == old_tomli_w
    assert finding.level is Level.ERROR


def test_notices_that_a_run_has_kept_are_warnings(tmp_path: Path) -> None:
    (tmp_path / "notices.jsonl").write_text('{"text": "2 samples failed", "step": 4}\n')
    found = next(finding for finding in examine(run_dir=str(tmp_path)) if finding.what == "2 samples failed")
    assert (found.level, found.why) == (Level.WARNING, "noted by the run with 4 steps done")
    assert found.fix == f"see {tmp_path}/notices.jsonl"


def test_shares_without_a_variant_of_four_ranks_are_a_warning() -> None:
    def told(backend: str) -> list[str]:
        findings = [each for each in check_named(f"corerl_testing.broken:{backend}") if isinstance(each, Finding)]
        return [each.what.partition(": ")[2] for each in amiss(findings)]

    assert told("FORGETS_OTHER_PAIRS") == []  # has a variant on four
    assert told("RANK_DEPENDENT_METRICS") == []  # every rank has samples of its own
    assert told("ANSWERS_ON_EVERY_RANK") == [
        "its data_parallel is not always the number of ranks, and no variant has ranks=4"
    ]
