"""``pql bench placement``: the search on simulated machines, and a short real measurement."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import bits, differences, go_on, small_config, start

from pql.cli import bench_placement as placement
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.env import ObsSpec
from pql.data.sizes import ReplayLayout, preflight
from pql.engine.executors import Inline
from pql.engine.placement import Machine, available_bytes, device_memory, machine_of
from pql.errors import ConfigError, gib


class Made:
    """A machine whose ticks take as long as its slowest part, and what is open on it."""

    def __init__(self, cost):
        self.cost, self.open, self.made = cost, 0, []

    def __call__(self, split):
        self.open += 1
        self.made.append(split)
        return Run(self, split)


class Run:
    def __init__(self, machine, split):
        self.machine, self.split = machine, split

    def rate(self, seconds):
        return 1 / max(self.machine.cost(self.split).values())

    def busy(self):
        return self.machine.cost(self.split)

    def close(self):
        self.machine.open -= 1


def search(cost, start, cores):
    machine, reported = Made(cost), []
    best = placement.search(machine, start, cores, 0.0, 3, lambda split, ratio: reported.append((split, ratio)))
    assert machine.open == 0
    assert [s for s, _ in reported] == machine.made[1:]
    return best, reported


def test_the_busiest_part_is_tried_first_and_what_is_faster_is_kept():
    """Work 8 for v and 6 for the simulator, shared among their threads: both want all four cores."""
    best, reported = search(lambda s: {"v": 8 / s["v"], "simulator": 6 / s["simulator"]}, {"simulator": 1, "v": 1}, 4)
    assert best == {"simulator": 4, "v": 4}
    assert reported[:3] == [
        ({"simulator": 1, "v": 2}, pytest.approx(8 / 6)),
        ({"simulator": 1, "v": 4}, 1.0),  # now the simulator bounds the tick: no faster, and not kept
        ({"simulator": 2, "v": 2}, pytest.approx(6 / 4)),
    ]


def test_where_no_other_split_is_clearly_faster_the_default_stays():
    start = {"collector": 1, "v": 1}
    best, reported = search(lambda s: {"collector": 1.0, "v": 1 / (1 + 0.02 * (s["v"] > 1))}, start, 2)
    assert best == start
    assert len(reported) == 2


def test_rates_are_compared_in_turn_and_an_odd_round_does_not_count():
    class Listed(Run):
        def __init__(self, rates):
            self.rates = iter(rates)

        def rate(self, seconds):
            return next(self.rates)

    assert placement.faster(Listed([2, 9, 4]), Listed([1, 1, 2]), 0.0, 3) == 2


@pytest.mark.parametrize(("cores", "want"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_the_numbers_tried(cores, want):
    reported = search(lambda s: {"v": 1.0}, {"v": 1}, cores)[1]
    assert [1, *(s["v"] for s, _ in reported)] == want


def test_what_has_threads():
    assert list(placement.splits(compose(["task=pendulum", "device=cpu"]))) == ["collector", "v", "p"]
    assert list(placement.splits(compose(["task=pendulum", "algo=ppo", "device=cpu"]))) == ["collector", "v"]
    pytest.importorskip("mujoco")
    assert "simulator" in placement.splits(compose(["task=hopper", "device=cpu"]))
    assert "simulator" not in placement.splits(compose(["task=hopper", "device=cpu", "task.kwargs.threads=1"]))


@pytest.mark.parametrize(("algo", "parts"), [("pql", 3), pytest.param("ppo", 2, marks=pytest.mark.slow)])
def test_real_runs_are_measured(capsys, monkeypatch, algo, parts):
    monkeypatch.setattr(placement, "available_cores", lambda: 2)
    sizes = ["num_envs=8", "algo.critic.hidden=[8]", "algo.policy.hidden=[8]", "device=cpu"]
    assert placement.measure_placements(["task=pendulum", f"algo={algo}", *sizes], seconds=0.01, rounds=1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{algo} on pendulum, 2 cores; the default split: collector=")
    assert parts <= sum("of the best so far: collector=" in line for line in lines) < 2**parts
    assert "no setting to change" in lines[-1] or lines[-1].startswith("placement.threads.")


@pytest.mark.parametrize(
    ("anew", "last"), [(1.2, "placement.threads.v=2"), (0.9, "within noise: no setting to change")]
)
def test_luck_does_not_count(capsys, monkeypatch, anew, last):
    """The winner of many measurements is measured once more against the default."""
    machine = Made(lambda split: {"v": 1.0, "collector": 0.5, "p": 0.5})
    monkeypatch.setattr(placement, "Trial", lambda config, split: machine(split))
    monkeypatch.setattr(placement, "available_cores", lambda: 2)
    ratios = iter([1.1, 1.0, 1.0, anew])
    monkeypatch.setattr(placement, "faster", lambda a, b, seconds, rounds: next(ratios))
    words = ["task=pendulum", "device=cpu", *(f"placement.threads.{k}=1" for k in ("collector", "v", "p"))]
    assert placement.measure_placements(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    assert machine.open == 0


def test_mistakes_are_one_line(capsys, monkeypatch):
    for argv, message in (
        (["placement", "seconds=0"], "seconds=0: expected a number from 1 up to 3600"),
        (["placement", "task=pendulm"], "(did you mean pendulum?)"),
        (["speed"], "argument what: invalid choice: 'speed'"),
    ):
        assert main(["bench", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    monkeypatch.setattr(placement, "machine_of", lambda config: Machine({}, {}))
    with pytest.raises(ConfigError, match="expected a worker or a simulator with threads on the CPU"):
        placement.splits(compose(["task=pendulum", "device=cpu"]))


@pytest.mark.parametrize(
    ("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)]
)
def test_idle_threads_of_torch_leave_the_cores_to_the_simulator(given: dict[str, str], found: str | None) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, sys, pql; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(found), "False"]


@pytest.mark.parametrize("algo", [{}, {"family": "sac", "explore": {"kind": "none"}}], ids=["ddpg", "sac"])
def test_a_p_learner_on_another_device_learns_the_same(algo, monkeypatch):
    """On the same processor under another name: its replay of observations gives the bits of the shared replay."""
    config = small_config(algo=algo)
    reference = bits(go_on(start(config, Inline()), 6))
    places = {"v": torch.device("cpu"), "p": torch.device("cpu:0"), "collector": torch.device("cpu")}
    monkeypatch.setattr("pql.run.build.machine_of", lambda config: replace(machine_of(config), devices=places))
    parts = go_on(start(config, Inline()), 6)
    rings = parts.collector.stores
    assert [ring.obs_only for ring in rings] == [False, True]
    assert parts.learners["p"].draw.replay is rings[1]
    apart = bits(parts)
    shared = {k: v for k, v in reference.items() if k in apart}
    assert len(shared) > 10
    assert differences(shared, {k: apart[k] for k in shared}) == []


@pytest.mark.parametrize(
    ("free", "share", "reserved", "left"),
    [
        (126, 1.0, 0, 126),  # what other processes leave
        (126, 0.1, 0, 14),  # what this process may use
        (126, 0.1, 4, 10),  # and has not yet reserved
        (126, 0.1, 20, 0),  # a limit that came later
        (8, 0.1, 0, 8),
    ],
)
def test_a_process_s_limit_on_a_device_counts(monkeypatch, free, share, reserved, left):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {0: share}.__getitem__)  # it takes no "cuda"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved << 30)
    device = torch.device("cuda")
    assert device_memory(device) == left << 30
    assert available_bytes(device) == int((left << 30) * 0.9)


def test_a_replay_larger_than_the_device_is_refused_in_plain_numbers():
    layout = ReplayLayout({"policy": ObsSpec((1,))}, 1, 16, 0, 1, 1000)
    with pytest.raises(ConfigError) as error:
        preflight(layout, 10**12, 113 * 2**30)
    text = r"expected at most \d+ here: this many need \d\d,\d00 GiB, 113 GiB are free"
    assert re.fullmatch(f"replay.capacity=1000000000000: {text}", str(error.value))
    assert [gib(n) for n in (2**30, 1234 * 2**40, 5_000, 0)] == ["1 GiB", "1,260,000 GiB", "0.00000466 GiB", "0 GiB"]
