"""``pql profile``: whose kernels a trace holds, what they add up to, and what is printed."""

import gzip
import json

import pytest
from run_files import words

from pql.cli.main import main
from pql.cli.profile import Profiled, hints
from pql.reports.trace import Work, largest, work_of


def event(cat, name, ts, dur, tid=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


GPU = [
    event("user_annotation", "v", 0, 10),
    event("user_annotation", "collector", 20, 10),
    event("cuda_runtime", "cudaGraphLaunch", 2, 1, correlation=7),
    event("cuda_runtime", "cudaLaunchKernel", 22, 1, correlation=8),
    event("cuda_driver", "cuLaunchKernel", 24, 1, correlation=9),
    event("cuda_runtime", "cudaLaunchKernel", 50, 1, correlation=10),  # of no worker
    event("kernel", "gemm", 100, 30.0, tid=7, correlation=7),
    event("kernel", "gemm", 130, 20.0, tid=7, correlation=7),  # a graph's kernels share its launch
    event("kernel", "fused", 150, 5.0, tid=7, correlation=7),
    event("gpu_memcpy", "Memcpy DtoD", 100, 2.0, tid=9, correlation=8),
    event("kernel", "physics", 110, 40.0, tid=9, correlation=9),
    event("kernel", "other", 160, 99.0, tid=3, correlation=10),
    event("kernel", "unknown", 160, 99.0, tid=3, correlation=11),
    event("cpu_op", "aten::add", 3, 1),
    {"ph": "M", "name": "process_name", "args": {}},
]


def test_kernels_belong_to_the_worker_that_launched_them():
    work, on_gpu = work_of(GPU, ["v", "collector"])
    assert on_gpu
    assert work["v"] == Work(3, 55.0, {"gemm": (50.0, 2), "fused": (5.0, 1)})
    assert work["collector"] == Work(2, 42.0, {"Memcpy DtoD": (2.0, 1), "physics": (40.0, 1)})
    assert largest(work, 2) == [("v", "gemm", 50.0, 2), ("collector", "physics", 40.0, 1)]


def test_on_a_cpu_operations_count_that_no_other_calls():
    found = [
        event("user_annotation", "v", 0, 100, tid=1),
        event("user_annotation", "p", 0, 100, tid=2),
        event("cpu_op", "body", 1, 90, tid=1),  # a program of operations
        event("cpu_op", "aten::linear", 5, 20, tid=1),
        event("cpu_op", "aten::addmm", 6, 10, tid=1),
        event("cpu_op", "aten::add", 25, 5, tid=1),
        event("cpu_op", "aten::mul", 5, 7, tid=2),
        event("cpu_op", "aten::mul", 200, 7, tid=2),  # after its work
    ]
    work, on_gpu = work_of(found, ["v", "p"])
    assert not on_gpu
    assert work == {
        "v": Work(2, 25.0, {"aten::linear": (20.0, 1), "aten::add": (5.0, 1)}),
        "p": Work(1, 7.0, {"aten::mul": (7.0, 1)}),
    }


def test_a_run_is_profiled_and_its_trace_names_the_workers(tmp_path, capsys):
    out = tmp_path / "trace.json.gz"
    given = [w for w in words(tmp_path / "run") if not w.startswith(("run_dir", "budget"))]
    assert main(["profile", *given, "budget.env_steps=100000", "--out", str(out), "--ticks", "3"]) == 0
    said = capsys.readouterr().out
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    assert {name: ranges.count(name) for name in ("collector", "v", "p")} == {"collector": 3, "v": 3, "p": 3}
    assert said.startswith("a tick: ")
    table = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith(("collector", "v ", "p "))}
    work, _ = work_of(events, ["collector", "v", "p"])
    assert float(table["v"][2]) == round(work["v"].count / 3 / 2)  # two critic updates a tick
    assert work["v"].count > 30
    for name in ("v", "p", "collector"):
        assert 0 < float(table[name][-1].rstrip("%")) <= float(table[name][1].rstrip("%"))  # a worker is one thread
    assert table["collector"][3:6] == ["per", "env", "step"]
    assert "the tick is bounded by" in said
    assert f"trace: {out}" in said
    assert not (tmp_path / "run").exists()


class Parts:
    """A tick of one step, eight critic and four policy updates."""

    class schedule:  # noqa: N801
        class counts:  # noqa: N801
            horizon, updates = 1, {"v": 8, "p": 4}

    jobs = ("v", "p")

    def __init__(self, compiled, captured):
        self.compiled, self.collector = lambda: compiled, type("C", (), {"slices": [type("S", (), captured)]})


@pytest.mark.parametrize(
    ("kernels", "us", "busy", "compiled", "captured", "want"),
    [
        (800, 8000, 0.9, ["v", "p", "collector"], True, []),
        (808, 8000, 0.9, [], True, ["many small kernels (v): placement.compile=auto compiles them"]),
        (400, 100, 0.9, ["v"], True, ["the device waits for the host: graphs=auto captures updates and steps"]),
        (
            400,
            8000,
            0.1,
            ["v"],
            False,
            ["the simulator's step is no part of a graph: the host launches it (docs/guides/performance.md#graphs)"],
        ),
    ],
)
def test_what_to_change_follows_from_the_numbers(kernels, us, busy, compiled, captured, want):
    work = {"v": Work(kernels, us), "p": Work(), "collector": Work()}
    found = Profiled(0.01, {"v": busy, "collector": 0.5}, work, 1, True, {})
    assert [*hints(Parts(compiled, {"whole": captured}), found)] == want


def test_what_cannot_be_profiled_is_refused(capsys, tmp_path):
    assert main(["profile", "task=cartpole", "algo=a3c"]) == 2
    assert capsys.readouterr().err == "pql: algo.schedule=replicas: expected another: replicas have no common tick\n"
    assert main(["profile", "task=pendulum", "--ticks", "0"]) == 2
    assert capsys.readouterr().err == "pql: --ticks=0: expected at least 1\n"
    assert main(["profile", "task=remote", "algo=pql"]) == 2
    assert capsys.readouterr().err == "pql: task=remote: expected the simulator's own task, without actors\n"
    for path in (tmp_path / "none" / "trace.json", tmp_path):
        assert main(["profile", "task=pendulum", "--out", str(path)]) == 2
        assert f"--out={path}: expected a file in a folder that exists" in capsys.readouterr().err
