"""A fleet of actors: what it says and decides without Ray, and a Ray cluster of three nodes that loses one."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import small_config
from pairs import free_port
from remotes import remote, wait_until

from pql.cli.main import main
from pql.cli.parser import parser
from pql.engine import deadlines
from pql.engine.executors import Inline
from pql.errors import ConfigError, RunError
from pql.remote.actor.command import ActorOptions, setup_of
from pql.remote.actor.sims import make_sim
from pql.remote.env import Remote
from pql.remote.fleet import host as hosts
from pql.remote.fleet.host import STEADY, FleetHost, Look
from pql.remote.fleet.status import TRIES, FleetStatus
from pql.run.build import build


def status_of(count=2):
    lines = []
    status = FleetStatus(count, 4, lines.append)
    status.lines = lines
    return status


def test_one_that_was_lost_is_reported_where_it_is_again():
    status = status_of()
    status.see({0: Look("a", 1, 5, True), 1: Look("b", 2, 5, True)}, 0.0)
    assert status.lines == ["actor 0 is on a", "actor 1 is on b", "2 of 2 acting on 2 nodes; 40 env steps/s"]
    status.see({1: None}, 1.0)
    assert status.lines[-1] == "1 of 2 acting on 1 node, 1 starting, or waiting for room"
    status.see({1: Look("a", 3, 2, True)}, 2.0)
    assert status.lines[-2] == "actor 1 was lost, and is on a"
    assert status.lines[-1].startswith("2 of 2 acting on 1 node, 1 restarts so far")
    assert status.steps == 12


def test_what_is_wrong_with_all_of_them_is_an_error():
    status = status_of()
    status.see({0: Look("a", 1, said="--task=ant: expected another", setting=("--task", "ant", "another"))}, 1.0)
    assert isinstance(status.error, ConfigError)
    assert str(status.error) == "--task=ant: expected another"


@pytest.mark.parametrize("lost", [False, True])
def test_a_simulator_that_never_begins_is_an_error_after_some_tries(lost):
    status, said = status_of(1), "" if lost else "OSError: no display; next attempt in 2.0 s"
    for i in range(TRIES):
        assert status.error is None
        status.see({0: Look("a", i * lost, said=said, failures=(i + 1) * (not lost))}, float(i))
    if lost:
        status.see({0: Look("a", TRIES)}, float(TRIES))
    assert isinstance(status.error, RunError)
    why = "its process ended" if lost else "OSError: no display"
    assert str(status.error) == f"actor 0 on a failed {TRIES} times in a row: {why}"


def test_once_somebody_has_stepped_one_bad_machine_is_tried_for_ever():
    status, refused = status_of(), ("--task", "ant", "packages")
    status.see({0: Look("a", 1, 1, True)}, 0.0)
    for i in range(3 * TRIES):
        status.see({1: Look("b", 2, said="no", failures=i, setting=refused)}, float(i))
    assert status.error is None
    assert "actor 1 on b failed: no" in status.lines


def test_the_status_says_who_has_no_place_and_who_has_no_learner():
    status = status_of(4)
    looking = Look("b", 3, said="unavailable: refused; next attempt at h:1 in 3.2 s")
    looks = {0: Look("a", 1, 0, True), 1: Look("a", 2, 0, True), 2: looking, 3: None}
    status.see(looks, 1.0)
    words = "2 of 4 acting on 1 node, 1 without a learner (unavailable: refused), 1 starting, or waiting for room"
    assert status.lines[-1] == words
    count = len(status.lines)
    looks[2] = looking._replace(said="unavailable: refused; next attempt at h:1 in 7.9 s")
    looks[0] = Look("a", 1, 300, True)
    status.see(looks, 2.0)
    assert len(status.lines) == count  # nothing new
    status.see({}, 61.0)
    assert status.lines[-1] == f"{words}; 20 env steps/s"


# -- one actor ------------------------------------------------------------------------------------------------------


def hosted(address, **more):
    """A host's thread, and where its ending comes."""
    host, ending = FleetHost(ActorOptions(address, "counter", 2, {}, **more), "here"), []
    thread = threading.Thread(target=lambda: ending.append(host.run()), daemon=True)
    thread.start()
    return host, thread, ending


def test_a_host_says_what_its_actor_does_and_lets_it_leave_between_two_steps(tmp_path):
    address = f"unix:{tmp_path}/s"
    with remote(address, [make_sim("counter", 2, {})], 4, groups=1) as env:
        host, thread, ending = hosted(address)
        wait_until(lambda: env.table.live == 2)
        env.reset(0)
        for _ in range(3):
            env.step(torch.zeros(4, 2))
        assert host.look() == Look("here", os.getpid(), 3, True, f"connected to {address} as actor 1")
        host.leave()
        step = env.step(torch.zeros(4, 2))
        thread.join(10)
        assert ending == [None]
        wait_until(lambda: env.table.live == 1)
        assert step.valid[:2].all()


def broken(num_envs, device):
    raise OSError("no display\nat all")


def test_an_actor_that_fails_is_made_again_after_a_growing_delay(monkeypatch):
    """From 1 to 60 s; after a minute of acting earlier failures no longer count."""
    host, delays = FleetHost(ActorOptions("h:1", "test_fleet:broken", 2, {})), []

    def wait(delay):
        delays.append(delay)
        if len(delays) == 10:
            host.leave()

    monkeypatch.setattr(hosts.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(host._leave, "wait", wait)
    times = iter(t for i in range(10) for t in (0.0, STEADY + 1 if i == 8 else 1.0))
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert host.run() is None
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]
    assert host.look().said == "OSError: no display; next attempt in 2.0 s"
    assert (host.look().failures, host.look().setting) == (2, None)


def test_a_host_tells_errors_and_the_end(tmp_path, monkeypatch):
    address = f"unix:{tmp_path}/s"
    host = FleetHost(ActorOptions(address, "no_such_task", 2, {}))
    monkeypatch.setattr(host._leave, "wait", lambda delay: host.leave())
    host.run()
    assert host.look().setting[:2] == ("--task", "no_such_task")
    with remote(address, [make_sim("counter", 2, {})], 4) as env:
        _, thread, ending = hosted(address)
        wait_until(lambda: env.table.live == 2)
        env.close()
        thread.join(10)
        assert ending == ["the run has ended"]


def test_token_and_certificate_are_read_where_the_command_runs(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("hush\n")
    (tmp_path / "cert").write_text("-----BEGIN CERTIFICATE-----")
    words = ["fleet", "--connect", "far.lan:5555", "--task", "atari", "--num-envs", "8", "--role", "eval", "game=pong"]
    files = ["--token-file", str(tmp_path / "token"), "--ca", str(tmp_path / "cert")]
    setup = setup_of(parser().parse_args([*words, *files]))
    assert setup == ActorOptions(
        "far.lan:5555", "atari", 8, {"game": "pong"}, "eval", "hush", b"-----BEGIN CERTIFICATE-----"
    )
    monkeypatch.setenv("PQL_TOKEN", "from there")
    assert setup_of(parser().parse_args(words)).token == "from there"


def test_secrets_are_not_shown():
    assert "hush" not in repr(ActorOptions("h:1", "counter", 2, {}, token="hush", ca=b"hush"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--actors", "0"], "--actors=0: expected a number from 1"),
        (["--cpus", "-1"], "--cpus=-1: expected a number above 0"),
        (["--connect", "nowhere"], "--connect=nowhere: expected HOST:PORT"),
        (["--num-envs", "0"], "--num-envs=0: expected a number from 1"),
        (["--token-file", "/no/such/file"], "--token-file=/no/such/file: expected a file"),
        (["--token-file", __file__], f"--token-file={__file__}: expected a token: one line"),
        (["--ca", "/dev/null"], "--ca=/dev/null: expected a PEM file, with '-----BEGIN CERTIFICATE-----' in it"),
        (["nonsense"], "override=nonsense: expected the form key=value"),
    ],
)
def test_wrong_words_are_one_line(words, why, capsys):
    assert main(["fleet", "--connect", "h:1", "--task", "counter", *words]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_a_cluster_that_is_not_there_is_refused_at_once(capsys):
    pytest.importorskip("ray")
    assert main(["fleet", "--connect", "h:1", "--task", "counter", "--ray", f"127.0.0.1:{free_port()}"]) == 2
    said = capsys.readouterr().err
    assert "expected a Ray cluster (ray start --head), or local: " in said
    assert said.count("\n") == 1


def test_without_ray_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["fleet", "--connect", "h:1", "--task", "counter"]) == 2
    assert "pip install 'pql-rl[cluster]'" in capsys.readouterr().err


# -- a cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    """Three nodes on this machine: a head that runs no actors, and two with room for two each."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)  # pytest's own is too long for the paths of its sockets
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(num_cpus=2)
            yield nodes
        finally:
            nodes.shutdown()


@pytest.mark.slow
@pytest.mark.fault(21)
def test_a_lost_node_s_actor_comes_back_elsewhere_and_the_run_goes_on(cluster, tmp_path):
    address, log = f"unix:{tmp_path}/s", tmp_path / "log"
    words = ["fleet", "--ray", cluster.address, "--connect", address, "--actors", "2", "--num-envs", "2"]
    words = [sys.executable, "-m", "pql", *words, "--task", "gymnasium", "id=Pendulum-v1"]
    with log.open("w") as file:
        fleet = subprocess.Popen(words, stderr=file)
    try:
        env = Remote(4, listen=address, timeout=120)
        wait_until(lambda: env.table.live == 2, 120)
        parts = build(small_config(num_envs=4, algo={"v_per_step": 0.25, "p_per_v": 1}), env=env, executor=Inline())
        parts.start()
        parts.warm_up(8)
        parts.begin()
        wait_until(lambda: len(where(log)) == 2)
        assert len(set(where(log).values())) == 2
        own = re.search(r"this is node (\w+)", log.read_text())[1]
        victim = next(n for n in cluster.worker_nodes if n.node_id[:8] != own)
        cluster.remove_node(victim, allow_graceful=False)
        alone = 0
        while env.table.admitted < 3 or env.table.live < 2:
            before = parts.env_steps
            parts.schedule.tick()
            alone += parts.env_steps - before if env.table.live == 1 else 0
        assert alone > 0
        wait_until(lambda: "restarts so far" in log.read_text())
        assert victim.node_id[:8] not in where(log).values()
        assert " was lost, and is on " in log.read_text()
        fleet.send_signal(signal.SIGTERM)
        wait_until(lambda: env.table.live == 0 or bool(parts.schedule.tick()), deadlines.LEAVE + 20)
        assert fleet.wait(deadlines.LEAVE + 20) == 130
        env.close()
    finally:
        fleet.kill()
        print(log.read_text())


def where(log: Path) -> dict[str, str]:
    """Of each of the fleet's actors the newest node."""
    return dict(re.findall(r"actor (\d+)(?: was lost, and)? is on \S+ \(node (\w+)\)", log.read_text()))
