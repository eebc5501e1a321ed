"""R2D2 on a CUDA device: captured bursts on sequences, two streams, no host syncs."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch
from conftest import HERE_TOO, differences, never_waiting, traces
from r2d2_runs import config_of
from test_gpu import Ordered, run, settle

from pql.algos.registry import seeds
from pql.engine.executors import Inline
from pql.run.build import build

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _place(machine, monkeypatch):
    """PyTorch reuses its 32 streams: graphs captured on them must be gone before others are."""
    monkeypatch.setitem(globals(), "DEVICE", "cuda" if machine == "cuda" else "cpu")
    yield
    if machine == "cuda":
        gc.collect()
        torch.cuda.synchronize()


def gpu_config(*changes, **settings):
    sizes = {
        "graphs": "auto",
        "num_envs": 64,
        "replay": {"capacity": 64 * 60},
        "placement": {"executor": "auto"},
        "budget": {"env_steps": 100_000},
    }
    own = {"batch_size": 32, "target_period": 256}
    return replace(config_of(own, sizes, *changes), device=DEVICE, **settings)


@HERE_TOO
def test_a_captured_run_equals_an_eager_one():
    ticks = 20 if DEVICE == "cuda" else 3
    captured, eager = (run(gpu_config(graphs=g), ticks) for g in ("on", "off"))
    assert differences(captured, eager) == []


def test_warm_up_and_capture_leave_no_trace():
    parts = build(gpu_config(graphs="on"))
    before = settle(parts)
    parts.prepare()
    assert traces(before, settle(parts)) == []
    assert all(job.graph.graph is not None for job in parts.jobs.values())


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_tick_never_waits_for_the_device(graphs):
    parts = build(gpu_config(graphs=graphs))
    parts.prepare()
    parts.collector.start(seeds(parts.config.seed)["env"])
    parts.collector.warm_up(parts.config.algo.warmup_steps)
    parts.begin()
    parts.schedule.tick()  # objects that are created on first use are created here
    with never_waiting():
        for _ in range(4):
            parts.schedule.tick()


@HERE_TOO
def test_every_order_on_two_streams_gives_the_same_bits():
    config, ticks = gpu_config({"schedule": "concurrent"}), 20 if DEVICE == "cuda" else 3
    reference = run(config, ticks, Inline())
    for order in itertools.permutations(("collector", "v")):
        assert differences(reference, run(config, ticks, Ordered(config, order))) == [], order
