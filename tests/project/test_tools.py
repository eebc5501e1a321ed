"""The benchmark scripts run and report rows of the agreed form; the measured numbers are meaningless here."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sampling import sample
from stand_in import pretend
from torch.utils.flop_counter import FlopCounterMode

from pql.algos.value import make_q_network
from pql.config import changed
from pql.contract.env import Discrete, EnvSpec, ObsSpec

ROOT = Path(__file__).parents[2]
FIELDS = {"name": str, "value": float, "unit": str, "baseline": float, "ratio": float, "runs": int, "machine": str}
NULLABLE = ("baseline", "ratio")


def check(rows, named):
    """The agreed fields and types, finite numbers, no name twice, and ``named`` among the names."""
    assert rows
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() == FIELDS.keys()
        for field, kind in FIELDS.items():
            if field not in NULLABLE or row[field] is not None:
                assert isinstance(row[field], kind), (row["name"], field)
        assert math.isfinite(row["value"])
        assert (row["ratio"] is None) == (row["baseline"] is None)
        if row["ratio"] is not None:
            assert 0 < row["ratio"] < math.inf
    for name in named:
        assert any(name in row["name"] for row in rows), name


SMOKE = {
    "schedule": (
        "waiting: concurrent / lockstep",
        "waiting: tick / slowest worker",
        "busy",
        "v alone",
        "halves: by turns / one after the other",
        "halves: by turns / all at once",
    ),
    "replay": ("sample B=", "sample_obs B=", "insert N=4 D=17 / copy_"),
    "learner": ("cpu: critic / matmuls", "cpu: policy burst of 1 / matmuls", "wide: critic / matmuls"),
    "process": (
        "round trip, 64 envs / bare",
        "round trip, 64 envs / in this process",
        "overlap: in another process",
    ),
    "warp_envs": ("warp halfcheetah (shipped) n=4 / bare", "warp halfcheetah (shipped) n=4: bytes"),
    "remote": ("env steps: 2 actors of", "p50 round trip", "server, 2 actors of 32", "processor time"),
    "lag": ("ball_balance: vtrace, lag 8 / 0", "one_step", "none"),
    "atari": ("raw stepping", "serial / bound", "halves / serial", "update B=8", "training DQN", "memory"),
}
EXTRA = {"warp_envs": ["--device", "cpu"]}
NEEDS = {"atari": "ale_py", "remote": "ale_py", "warp_envs": "mujoco_warp"}


LONG = ("atari", "lag", "process", "remote")


@pytest.mark.parametrize("name", sample(SMOKE, keep=[n for n in SMOKE if n not in LONG]))
def test_a_benchmark_runs_and_reports(name, tool, tmp_path, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    path = tmp_path / "rows.json"
    assert not tool(f"bench.{name}").main(["--smoke", "--json", str(path), *EXTRA.get(name, [])])
    rows = json.loads(path.read_text())
    check(rows, SMOKE[name])
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in rows)


def flops(fn):
    """Multiply-adds, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


def test_bare_products_are_those_of_the_real_update(tool):
    bench = tool("bench.learner")
    args = SimpleNamespace(device="cpu", presets=["cpu"], smoke=True)
    config = bench.presets(args)["cpu"]
    parts = bench.ready(config, torch.device("cpu"))
    bare = bench.bare_updates(config, torch.device("cpu"))
    for worker in ("v", "p"):
        assert flops(bench.updates(parts, worker)) == flops(bare[worker]) > 0
    parts.schedule.executor.close()


@pytest.mark.parametrize("name", ["learner", "atari"])
def test_on_a_device_bare_products_are_captured_as_a_burst_is(name, tool, monkeypatch):
    """Otherwise a ratio would compare kernels with launches. On a stand-in for the device."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    pretend(monkeypatch)
    bench, launched, asked = tool(f"bench.{name}"), [], []
    forward = bench.Products.forward
    monkeypatch.setattr(bench.Products, "forward", lambda self: launched.append(forward(self)))

    def timed(fns, rounds):
        before = len(launched)
        fns["bare"]()
        asked.append(len(launched) - before)
        return {"update": [8.0], "burst": [8.0], "bare": [4.0]}

    monkeypatch.setattr(bench, "alternate", timed)
    monkeypatch.setattr(bench, "microseconds", lambda fn, seconds, device: fn)
    given = {"device": "cpu", "seconds": 0, "rounds": 1, "threads": 1, "game": "pong", "batches": [8]}
    args = SimpleNamespace(presets=["cpu"], smoke=True, **given)
    if name == "atari":
        rows = bench.learning(args)
    else:
        config = changed(bench.presets(args)["cpu"], {"algo.v_per_step": 4, "algo.p_per_v": 0.5})
        rows = bench.bench("cpu", config, args)
    counts = [int(row["name"].partition("burst of ")[2].split()[0]) for row in rows[1::2]]
    assert counts == ([2] if name == "atari" else [4, 2])
    assert asked == [0] * len(counts)  # no launch of the products themselves
    assert [row["baseline"] for row in rows[1::2]] == [4 / count for count in counts]


def test_repeated_work_is_repeated_captured_or_not(tool, monkeypatch):
    x = torch.zeros(())
    calls = []

    def add():
        calls.append(1)
        x.add_(1)

    three = tool("bench.common").repeated(add, 3, torch.device("cpu"))
    three()
    assert (float(x), len(calls)) == (3, 3)
    pretend(monkeypatch)
    three = tool("bench.common").repeated(add, 3, torch.device("cpu"))
    before = float(x), len(calls)
    three()
    assert (float(x), len(calls)) == (before[0] + 3, before[1])


def test_bare_convolutions_are_those_of_the_real_update(tool):
    """A convolution's backward pass counts by which gradients it gives."""
    bench = tool("bench.atari")
    obs = {"policy": torch.randint(256, (4, 4, 84, 84), dtype=torch.uint8)}
    args = SimpleNamespace(game="pong", threads=1, device="cpu")
    spec = EnvSpec("pong", 4, {"policy": ObsSpec((4, 84, 84), torch.uint8, stack=4)}, Discrete(6), torch.device("cpu"))
    net = make_q_network(bench.make_config(args, 4, 4), spec)
    bare = bench.Products(net, obs)
    assert flops(lambda: net(obs).sum().backward()) == flops(bare.forward) + flops(bare.backward) > 0


def test_random_actions_and_policies_by_hand_play_whole_episodes(tool, tmp_path):
    path = tmp_path / "by_hand.json"
    words = ["--tasks", "pendulum", "catch", "ballbalance", "--episodes", "4", "--json", str(path)]
    tool("originals.by_hand").main(words)
    rows = {(row["task"], row["policy"]): row for row in json.loads(path.read_text())}
    assert [*rows] == [
        ("pendulum", "random actions"),
        ("catch", "random actions"),
        ("ballbalance", "random actions"),
        ("ballbalance", "a tilt against the ball"),
    ]
    assert rows["pendulum", "random actions"]["length_mean"] == 200
    assert -1800 < rows["pendulum", "random actions"]["return_mean"] < -700
    assert rows["ballbalance", "a tilt against the ball"]["return_mean"] > 100
    assert rows["ballbalance", "random actions"]["return_mean"] < 40


def test_environments_beside_bare_mujoco_and_gymnasium(tool, tmp_path, monkeypatch):
    pytest.importorskip("gymnasium.envs.mujoco")
    path, bench = tmp_path / "envs.json", tool("bench.envs")
    monkeypatch.setattr(bench, "RECORDED", 3)
    bench.main(["--smoke", "--envs", "hopper", "ballbalance", "--json", str(path)])
    named = ["hopper (shipped) n=2 / mujoco.batch", "ballbalance (fast) n=2 / mujoco.batch"]
    check(json.loads(path.read_text()), [*named, "hopper (shipped) n=2 / gymnasium sync n=8"])
