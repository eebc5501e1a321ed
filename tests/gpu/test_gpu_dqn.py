"""Value-based methods on a CUDA device: captured sum trees, sequences and noise, two streams, no host syncs."""

import gc
import itertools
from dataclasses import replace

import pytest
import r2d2_runs
import torch
from conftest import differences, everywhere, never_waiting, traces
from dqn_runs import PIXELS as RESIDUAL
from dqn_runs import VARIANTS, config_of
from test_gpu import Ordered, learners, run, settle

from pql.algos.registry import seeds
from pql.engine.executors import Inline
from pql.run.build import build

DEVICE = "cuda"
PIXELS = {"task": {"name": "catch", "kwargs": {}}, "algo": {"encoder": {"channels": [8], "features": 0}}}
PRODUCTS = {**PIXELS, "algo": {"encoder": {"kind": "hadamax", "channels": [4, 4], "features": 8}}}
CASES = {
    **{k: (v,) for k, v in VARIANTS.items()},
    "rainbow, pixels": (VARIANTS["rainbow"], PIXELS),
    "btr, pixels": (VARIANTS["btr"], RESIDUAL),
    "munchausen, hadamax": (VARIANTS["munchausen"], PRODUCTS),
    "r2d2": ({"family": "r2d2"},),
}
HERE = ("prioritized", "rainbow, pixels", "btr, pixels", "munchausen, hadamax")
EVERY_CASE = everywhere(CASES, name="case")


@pytest.fixture(autouse=True)
def _place(machine, monkeypatch):
    """PyTorch reuses its 32 streams: graphs captured on them must be gone before others are."""
    monkeypatch.setitem(globals(), "DEVICE", "cuda" if machine == "cuda" else "cpu")
    yield
    if machine == "cuda":
        gc.collect()
        torch.cuda.synchronize()


def gpu_config(first, *changes, **settings):
    make, rows, batch = (r2d2_runs.config_of, 60, 32) if first.get("family") == "r2d2" else (config_of, 256, 64)
    device = {"graphs": "auto", "num_envs": 64, "replay": {"capacity": 64 * rows}, "placement": {"executor": "auto"}}
    sizes = {"target_period": 256, "batch_size": batch}
    config = make(first, *changes, sizes, {**device, "budget": {"env_steps": 100_000}})
    return replace(config, device=DEVICE, **settings)


@everywhere(CASES, ("prioritized", "btr, pixels", "r2d2"), "case", slowly=HERE)
def test_a_captured_run_equals_an_eager_one(case):
    ticks = 20 if DEVICE == "cuda" else 4
    captured, eager = (run(gpu_config(*case, graphs=g), ticks) for g in ("on", "off"))
    assert differences(captured, eager) == []


@EVERY_CASE
def test_warm_up_and_capture_leave_no_trace(case):
    parts = build(gpu_config(*case, graphs="on"))
    before = settle(parts)
    parts.prepare()
    assert traces(before, settle(parts)) == []
    assert all(job.graph.graph is not None for job in parts.jobs.values())


@EVERY_CASE
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_tick_never_waits_for_the_device(case, graphs):
    parts = build(gpu_config(*case, graphs=graphs))
    parts.prepare()
    parts.collector.start(seeds(parts.config.seed)["env"])
    parts.collector.warm_up(parts.config.algo.warmup_steps)
    parts.begin()
    parts.schedule.tick()  # objects that are created on first use are created here
    with never_waiting():
        for _ in range(4):
            parts.schedule.tick()


@everywhere({k: CASES[k] for k in ("prioritized", "rainbow", "ape-x", "r2d2")}, ["ape-x", "r2d2"], "case")
def test_every_order_on_two_streams_gives_the_same_bits(case):
    config, ticks = gpu_config(*case, {"schedule": "concurrent"}), 20 if DEVICE == "cuda" else 4
    reference = run(config, ticks, Inline())
    for order in itertools.permutations(("collector", "v")):
        assert differences(reference, run(config, ticks, Ordered(config, order))) == [], order


def test_learning_changes_every_part_of_the_learners_state():
    config = gpu_config(VARIANTS["rainbow"])
    changed = differences(learners(run(config, 0)), learners(run(config, 20)))
    tree = ("priorities/tree/level0", "priorities/beta")
    for name in ("q/value.0.weight_sigma", *tree, "clock/updates", "optimizer/square"):
        assert f"learners/v/state/{name}" in changed
