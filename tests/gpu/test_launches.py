"""Upper bounds on the operations that a GPU executes: per collector step, per update, and per tick outside graphs.

Counted on the CPU, on the code path of a GPU, which never reads a value back. An operation is about one kernel,
including those of the backward pass; views do not count. A change that adds launches fails; one that saves some should
lower the bounds.
"""

import pytest
import torch
from conftest import merge, small_config, start

from pql.engine.tape import Count
from pql.envs.classic import CartpoleSwingup

SWINGUP = {"task": {"name": "cartpole_swingup", "kwargs": {"stagger": True}}, "num_envs": 4, "graphs": "auto"}
CRITIC, POLICY = ({"hidden": [8, 8, 8]} for _ in range(2))
PPO = {"family": "ppo", "schedule": "lockstep", "horizon": 4, "epochs": 1, "minibatches": 2}
RUNS = {
    "pql": {"algo": {"critic": CRITIC, "policy": POLICY}},
    "pql_d": {"algo": {"critic": {**CRITIC, "atoms": 11, "v_min": 0.0, "v_max": 10.0}, "policy": POLICY}},
    "sac": {"algo": {"family": "sac", "explore": {"kind": "none"}, "critic": CRITIC, "policy": POLICY}},
    "ppo": {"algo": {**PPO, "critic": CRITIC, "policy": POLICY}},
    "reppo": {"algo": {**PPO, "family": "reppo", "critic": {**CRITIC, "atoms": 11}, "policy": POLICY}},
    "dqn": {
        "task": {"name": "cartpole", "kwargs": {"stagger": True}},
        "algo": {"family": "dqn", "schedule": "lockstep", "n_step": 1, "critic": CRITIC, "target_period": 32},
    },
}
MOST = {
    "pql": {"collector step": 281, "v update": 123, "p update": 97, "tick beside graphs": 32},
    "pql_d": {"collector step": 281, "v update": 145, "p update": 101, "tick beside graphs": 32},
    "sac": {"collector step": 286, "v update": 141, "p update": 153, "tick beside graphs": 34},
    "ppo": {"collector step": 303, "learner update": 267.5, "tick beside graphs": 31},
    "reppo": {"collector step": 327, "learner update": 604.5, "tick beside graphs": 31},
    "dqn": {"collector step": 179, "v update": 122.5, "tick beside graphs": 25},
}


class Nothing:
    """In the place of a captured graph: it costs the host one launch."""

    def replay(self):
        pass


def counted(parts):
    """Operations by what they are for, and their names."""
    (one,), out = parts.collector.slices, {}
    bodies = {"collector step": (one._step_body, 1)}
    bodies |= {f"{name} update": (job.graph.body, job.size) for name, job in parts.jobs.items()}
    for name, (body, size) in bodies.items():
        with Count() as count, torch.set_grad_enabled(name != "collector step"):
            body()
        out[name] = (count.total / size, count.names)
    return {**out, "tick beside graphs": beside_graphs(parts)}


def beside_graphs(parts):
    """Of a tick in which captured graphs do nothing."""
    (one,) = parts.collector.slices
    for graph in (one._act, one._record, one._step, *(job.graph for job in parts.jobs.values())):
        graph.graph = None if graph.graph is None else Nothing()
    parts.schedule.tick()
    with Count() as count:
        parts.schedule.tick()
    return count.total, count.names


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
@pytest.mark.parametrize("name", RUNS)
def test_no_more_operations_than_there_were(machine, name):
    found = counted(start(small_config(**merge(SWINGUP, RUNS[name]))))
    assert found.keys() == MOST[name].keys()
    for what, (number, names) in found.items():
        assert number <= MOST[name][what], f"{what}: {dict(sorted(names.items(), key=lambda one: -one[1]))}"


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
@pytest.mark.parametrize(("name", "steps", "least"), [("pql", 1, 150), ("ppo", 4, 140)])
def test_a_captured_step_leaves_a_tick_few_launches(machine, name, steps, least, monkeypatch):
    """Beside one whose simulator stays outside of the graph."""
    config = small_config(**merge(SWINGUP, RUNS[name]))
    inside, _ = beside_graphs(start(config))
    monkeypatch.setattr(CartpoleSwingup, "capturable", False)
    outside, _ = beside_graphs(start(config))
    assert outside - inside >= least * steps
