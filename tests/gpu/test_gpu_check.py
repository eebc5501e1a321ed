"""``tools/gpu/check.py``: its parts accept their input, continue after an interruption, and build."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_tools import check

from pql.algos.registry import family_of
from pql.config.validate import validate
from pql.run.build import _check
from pql.run.environment import describe_env
from tools.gpu import cases as gpu_cases
from tools.gpu import check as gpu_check
from tools.gpu import kernels

ROOT = Path(__file__).parents[2]
PARTS = ("env", "tests", "pql", "update", "envs")
REAL = gpu_check.parse([])


@pytest.mark.parametrize("name", gpu_cases.configs(REAL))
def test_every_configuration_fits_its_task_at_its_real_size(name, monkeypatch):
    for place in ("pql.algos.builders", "pql.algos.on_policy"):
        monkeypatch.setattr(f"{place}.available_bytes", lambda device: 80 << 30)  # as much as a large GPU has
    config = gpu_cases.configs(REAL)[name]
    assert config.num_envs >= 4096
    config = validate(replace(config, device="cpu"))
    spec = describe_env(config)
    counts = family_of(config).counts(config)
    assert _check(config, spec, counts, torch.device("cpu"), None) > 0


def test_parts_are_those_promised_and_end_within_nine_minutes(capsys):
    assert tuple(gpu_cases.PARTS) == PARTS
    assert all(0 < part.seconds < 540 for part in gpu_cases.PARTS.values())
    assert gpu_check.main(["--list", "--device", "cuda"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{part} " in printed for part in PARTS)
    assert "test_gpu, " in printed
    assert "65536" in printed


def test_what_builds_nothing_is_not_missed():
    """A part that builds runs is asked for its configurations above."""
    named = {case for part in PARTS for case in (f"{part} {c.name}" for c in gpu_cases.PARTS[part].cases(REAL))}
    assert set(gpu_cases.configs(REAL)) <= named


def row(name):
    return {"name": name, "value": 1.0, "unit": "x", "baseline": None, "ratio": None, "runs": 1, "machine": "m"}


@pytest.fixture
def part(monkeypatch):
    """A part whose cases a test chooses: name -> function that yields."""
    cases = {}

    def listed(args):
        return [gpu_cases.Case(name, run) for name, run in cases.items()]

    monkeypatch.setattr(gpu_check, "PARTS", {"mine": gpu_cases.Part(60, "", listed)})
    return cases


def run(out, *words):
    status = gpu_check.main(["--device", "cpu", "--parts", "mine", "--out", str(out), *words])
    return status, json.loads((out / "mine.json").read_text())["cases"]


def test_a_case_that_fails_is_recorded_and_the_next_runs(part, tmp_path, capsys):
    calls = []

    def good():
        calls.append("good")
        yield row("a")
        yield "a note"

    def bad():
        calls.append("bad")
        yield row("b")
        raise ValueError("no such number")

    def lacking():
        gpu_cases.need("a_package_that_nobody_has")
        yield row("c")

    part.update(bad=bad, good=good, lacking=lacking)
    status, cases = run(tmp_path, "--here")
    assert status == 1
    failed = {"status": "failed", "rows": [row("b")], "notes": [], "error": "ValueError: no such number"}
    assert cases["bad"] | {"seconds": 0} == failed | {"seconds": 0}
    assert (cases["good"]["status"], cases["good"]["rows"], cases["good"]["notes"]) == ("done", [row("a")], ["a note"])
    assert cases["lacking"]["error"] == "not installed: a_package_that_nobody_has"
    part["bad"] = lambda: iter([row("b")])
    status, cases = run(tmp_path, "--here")
    assert (status, calls) == (0, ["bad", "good"])  # finished parts are not repeated
    assert cases["bad"]["status"] == "done"
    run(tmp_path, "--here", "--again")
    assert calls == ["bad", "good", "good"]
    assert "good: done before" in capsys.readouterr().out


def test_rows_are_saved_as_they_come(part, tmp_path):
    def watched():
        yield row("first")
        yield str(len(json.loads((tmp_path / "mine.json").read_text())["cases"]["watched"]["rows"]))

    part["watched"] = watched
    assert run(tmp_path, "--here")[1]["watched"]["notes"] == ["1"]


def test_what_does_not_fit_into_the_bound_is_left(part, tmp_path, capsys):
    part.update(one=lambda: iter([row("a")]), two=lambda: iter([row("b")]))
    clock = iter([0.0, 0.0, 59.0, *[60.0] * 5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_check.time, "monotonic", lambda: next(clock))
        status, cases = run(tmp_path, "--here")
    assert (status, [*cases]) == (1, ["one"])
    assert "left for want of time: two" in capsys.readouterr().out
    status, cases = run(tmp_path, "--here")
    assert (status, [*cases]) == (0, ["one", "two"])


CHILD = """
import json, os, sys, time
words = sys.argv
case, lines = words[words.index("--case") + 1], words[words.index("--lines") + 1]
with open(lines, "a") as out:
    print(json.dumps({"note": case}), file=out, flush=True)
    if case == "crash":
        os.abort()
    if case == "hang":
        time.sleep(60)
    print(json.dumps({"status": "done", "seconds": 1}), file=out)
"""


def test_a_crash_and_a_hang_end_their_own_case_alone(part, tmp_path, monkeypatch):
    """In a process each."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(gpu_check, "SCRIPT", str(child))
    part.update(dict.fromkeys(("crash", "fine", "hang")))
    status, cases = run(tmp_path, "--limit", "1.5")
    assert status == 1
    assert cases["crash"]["error"] == "the process ended with status -6"
    assert cases["fine"]["status"] == "done"
    assert cases["hang"]["error"].startswith("not over after ")
    assert [one["notes"] for one in cases.values()] == [["crash"], ["fine"], ["hang"]]


BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hydra", "omegaconf", "rich", "mujoco_warp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return find(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
sys.argv = ["check.py"]
from tools.gpu import check
sys.exit(check.main(sys.orig_argv[3:]))
"""


@pytest.mark.slow
def test_it_runs_without_hydra_and_reports(tmp_path):
    """Tiny, on the CPU; what it measures here means nothing."""
    words = ["--device", "cpu", "--smoke", "--here", "--out", str(tmp_path)]
    command = [sys.executable, "-c", BARE, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text())["cases"] for name in PARTS if name != "tests"}
    rows = [one for cases in found.values() for case in cases.values() for one in case["rows"]]
    for part, name in (
        ("pql", "concurrent / lockstep"),
        ("pql", "graphs on / off"),
        ("pql", "host per tick"),
        ("pql", "n=8 graphs off: kernels per critic update"),
        ("pql", "worker orders with other bits"),
        ("pql", "dqn n=8 graphs off: kernels per critic update"),
        ("update", "pql_d: critic / matmuls"),
        ("envs", "pendulum n=8: captured / eager"),
    ):
        assert any(name in one["name"] for case in found[part].values() for one in case["rows"]), name
    check(rows, [])
    assert all(one["value"] == 0 for one in rows if "rules broken" in one["name"] or "other bits" in one["name"])


def test_without_cuda_it_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert len(capsys.readouterr().out.strip().splitlines()) == 1


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "env,tset"])
    assert "--parts tset: expected some of env,tests" in capsys.readouterr().err


def test_pytest_is_asked_for_marked_tests_by_several_processes_where_it_can(monkeypatch):
    file, xml = Path("tests/gpu/test_gpu.py"), Path("x.xml")
    command = gpu_cases.pytest_command(file, xml, 4)
    assert command[command.index("-m", 3) + 1] == "gpu and not slow"
    assert "--durations=15" in command
    assert command[-2:] == ["-n", "4"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "-n" not in gpu_cases.pytest_command(file, xml, 4)
    assert {"test_gpu.py", "test_gpu_dqn.py", "test_gpu_atari.py", "test_mujoco_warp.py"} <= {
        f.name for f in gpu_cases.test_files()
    }


CODE = """
import torch
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', "triton_poi_fused_0.run()")
def call(self, args):
    triton_poi_fused_0.run(arg0, buf0, 8, stream=stream0)
    extern_kernels.mm(buf0, arg1, out=buf1)
    triton_per_fused_add_1.run(buf1, 8, stream=stream0)
    extern_kernels.bmm(buf1, arg1, out=buf2)
    del buf1
"""


def test_kernels_are_counted_where_they_are_launched():
    assert kernels.counts(CODE) == (4, 2)


@pytest.mark.parametrize(
    ("now", "status", "said"),
    [
        ({kernels.LEARNER: (79, 22), kernels.STEP: (33, 4)}, 0, "79 kernels, of these 22 products; at most 79, 24\n"),
        ({kernels.LEARNER: (80, 22), kernels.STEP: (33, 4)}, 1, "at most 79, 24: TOO MANY\n"),
        ({kernels.LEARNER: (72, 25), kernels.STEP: (33, 4)}, 1, "at most 79, 24: TOO MANY\n"),
        ({"another": (1, 0)}, 1, "ppo, another: 1 kernels, of these 0 products; at most 0, 0: TOO MANY\n"),
        ({kernels.STEP: (33, 4)}, 1, "ppo: not compiled: the updates of worker learner\n"),
    ],
)
def test_more_kernels_than_the_bounds_are_an_error(monkeypatch, capsys, now, status, said):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernels, "stand_in", lambda: None)
    monkeypatch.setattr(kernels, "count", lambda settings: ((name, *each) for name, each in now.items()))
    for name in ("possible", "place", "finish"):
        monkeypatch.setattr(kernels.Graph, name, kernels.Graph.__dict__[name])  # what main replaces is put back
    assert kernels.main(["--case", "ppo"]) == status
    assert said in capsys.readouterr().out


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch")
def test_a_cpu_build_of_torch_is_refused_in_one_line(capsys):
    assert kernels.main([]) == 2
    line = f"kernels.py: torch {torch.__version__} cannot generate code for CUDA: install a CUDA build of torch\n"
    assert capsys.readouterr().out == line
