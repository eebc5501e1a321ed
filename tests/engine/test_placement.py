"""Threads, devices and memory of a run."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import bits, differences, go_on, small_config, start
from families import MEMORY

from pql.contract.env import ObsSpec
from pql.data.sizes import ReplayLayout, preflight
from pql.engine.executors import Inline
from pql.engine.placement import available_bytes, device_memory, machine_of
from pql.errors import ConfigError, gib


@pytest.mark.parametrize(
    ("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)]
)
def test_idle_threads_of_torch_leave_the_cores_to_the_simulator(given: dict[str, str], found: str | None) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, sys, pql; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(found), "False"]


SAC = {"family": "sac", "explore": {"kind": "none"}}


@pytest.mark.parametrize("algo", [{}, SAC, {**SAC, **MEMORY}], ids=["ddpg", "sac", "sac, lstm"])
def test_a_p_learner_on_another_device_learns_the_same(algo, monkeypatch):
    """On the same processor under another name: its replay of observations gives the bits of the shared replay."""
    config = small_config(algo=algo)
    reference = bits(go_on(start(config, Inline()), 6))
    places = {"v": torch.device("cpu"), "p": torch.device("cpu:0"), "collector": torch.device("cpu")}
    monkeypatch.setattr("pql.run.build.machine_of", lambda config: replace(machine_of(config), devices=places))
    parts = go_on(start(config, Inline()), 6)
    rings = parts.collector.replays
    assert [ring.obs_only for ring in rings] == [False, "lstm" not in algo]
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
