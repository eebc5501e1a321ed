"""The benchmark scripts run and report rows of the agreed form; the measured numbers are meaningless here."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sampling import sample
from torch.utils.flop_counter import FlopCounterMode

from pql.algos.value import make_q_network
from pql.contract.env import Discrete, EnvSpec, ObsSpec, make_env

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
    "warp_envs": ("warp halfcheetah (shipped) n=4, captured / bare", "warp halfcheetah (shipped) n=4: bytes"),
    "remote": ("env steps: 2 actors of", "p50 round trip", "server, 2 actors of 32", "processor time"),
    "atari": ("raw stepping", "serial / bound", "halves / serial", "update B=8", "training DQN", "memory"),
}
EXTRA = {"warp_envs": ["--device", "cpu"]}
NEEDS = {"atari": "ale_py", "remote": "ale_py", "warp_envs": "mujoco_warp"}


LONG = ("atari", "process", "remote")


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


def test_bare_convolutions_are_those_of_the_real_update(tool):
    """A convolution's backward pass counts by which gradients it gives."""
    bench = tool("bench.atari")
    obs = {"policy": torch.randint(256, (4, 4, 84, 84), dtype=torch.uint8)}
    args = SimpleNamespace(game="pong", threads=1, device="cpu")
    spec = EnvSpec("pong", 4, {"policy": ObsSpec((4, 84, 84), torch.uint8, stack=4)}, Discrete(6), torch.device("cpu"))
    net = make_q_network(bench.make_config(args, 4, 4), spec)
    bare = bench.Products(net, obs)
    assert flops(lambda: net(obs).sum().backward()) == flops(bare.forward) + flops(bare.backward) > 0


def test_environments_beside_bare_mujoco_and_gymnasium(tool, tmp_path, monkeypatch):
    pytest.importorskip("gymnasium.envs.mujoco")
    path, bench = tmp_path / "envs.json", tool("bench.envs")
    monkeypatch.setattr(bench, "RECORDED", 3)
    bench.main(["--smoke", "--envs", "hopper", "ballbalance", "--json", str(path)])
    named = ["hopper (shipped) n=2 / mujoco.batch", "ballbalance (fast) n=2 / mujoco.batch"]
    check(json.loads(path.read_text()), [*named, "hopper (shipped) n=2 / gymnasium sync n=8"])


def test_bare_mujoco_and_gymnasium_step_as_much_physics_as_ours(tool, monkeypatch, tmp_path):
    """Ant's fast model has twice as many physics steps as the shipped one."""
    gymnasium, bench = pytest.importorskip("gymnasium"), tool("bench.envs")
    taken, made, make = [], [], gymnasium.make_vec

    def keeping(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    class Counting(bench.Batch):
        def step(self, nstep):
            taken.append(nstep)
            super().step(nstep=nstep)

    monkeypatch.setattr(bench, "Batch", Counting)
    monkeypatch.setattr(gymnasium, "make_vec", keeping)
    monkeypatch.chdir(tmp_path)
    for model, steps in (("fast", 10), ("shipped", 5)):
        env = make_env("ant", 2, threads=1, model=model, contact_forces=False)
        _, bare = bench.ours_and_bare(env, 1, 0.0)
        bare()
        with ExitStack() as stack:
            bench.gymnasium_round("ant", model, 0.0, stack)
            inner = made[-1].envs[0].unwrapped
            assert (inner.frame_skip, inner.dt) == (steps, pytest.approx(env.spec.info["dt"]))
        assert {*taken} == {steps}
        taken.clear()
        env.close()
