"""A fleet of actors: its decisions without Ray, and a Ray cluster of three nodes that loses one."""

import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

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
from pql.remote.fleet.cluster import reason
from pql.remote.fleet.host import FleetHost
from pql.remote.fleet.supervisor import FAILED, LOST, OVER, REFUSED, STEADY, STOPPED, TRIES, Ending, Fleet, Look
from pql.run.build import build

GONE = Ending(LOST, "The node has died.")


class Stage:
    """A cluster with room for ``room`` actors, whose events are scripted."""

    def __init__(self, room=99):
        self.room, self.calls, self.news = room, [], {}

    def place(self, number):
        self.calls.append(("place", number))
        self.news[number] = None

    def look(self):
        reported = dict(self.news)
        for number, found in reported.items():
            if isinstance(found, Ending):
                del self.news[number]
        return reported

    def stop(self, number):
        assert number in self.news
        self.calls.append(("stop", number))

    def remove(self, number):
        self.calls.append(("remove", number))
        del self.news[number]

    def said(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def stage():
    return Stage()


def fleet_on(stage, count=2):
    lines = []
    fleet = Fleet(stage, count, 4, lines.append, jitter=lambda low, high: high)
    fleet.lines = lines
    assert not fleet.turn(0.0)
    assert stage.said() == [("place", n) for n in range(count)]
    return fleet


def test_one_that_is_lost_is_placed_again_after_a_growing_delay(stage):
    fleet, now = fleet_on(stage), 0.0
    stage.news = {0: Look("a", 5, True), 1: Look("b", 5, True)}
    fleet.turn(now)
    assert fleet.lines[-1] == "2 of 2 acting on 2 nodes; 40 env steps/s"
    delays = []
    for _ in range(8):
        stage.news[1] = GONE
        fleet.turn(now)
        start = now
        while not stage.calls:
            now += 0.25
            fleet.turn(now)
        assert stage.said() == [("place", 1)]
        delays.append(now - start)
        stage.news[1] = Look("a", 0, True)
        fleet.turn(now)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert "1 on a was lost: The node has died." in " ".join(fleet.lines)
    assert fleet.lines[-1].startswith("2 of 2 acting on 1 node, 8 restarts so far")
    stage.news[1] = Look("a", 1, True)
    fleet.turn(now)
    stage.news[1] = Look("a", 2, True)
    fleet.turn(now + STEADY)
    stage.news[1] = GONE
    fleet.turn(now + STEADY)  # it had acted for so long that earlier failures no longer count
    fleet.turn(now + STEADY + 1.0)
    assert stage.said() == [("place", 1)]


def test_when_the_learner_says_that_it_is_over_nobody_is_placed_and_the_rest_leave(stage):
    fleet = fleet_on(stage, 4)
    stage.news = {0: Look("a", 5, True), 1: Look("b", 5, True), 2: GONE, 3: None}
    fleet.turn(1.0)
    stage.news[0] = Ending(OVER, "the run has ended")
    assert not fleet.turn(1.5)
    assert stage.said() == [("stop", 1), ("stop", 3)]
    stage.news[1] = Ending(STOPPED, "")
    assert not fleet.turn(1.5 + deadlines.LEAVE - 0.1)
    assert stage.said() == []  # 2 was due long ago
    assert fleet.turn(1.5 + deadlines.LEAVE)  # 3 never had a place
    assert stage.said() == [("remove", 3)]
    assert fleet.error is None


def test_all_may_hear_at_once_that_it_is_over(stage):
    fleet = fleet_on(stage, 3)
    stage.news = dict.fromkeys(range(3), Ending(OVER, "the run has ended"))
    assert fleet.turn(1.0)
    assert stage.said() == []


def test_a_drain_lets_actors_leave_and_takes_who_does_not(stage):
    fleet = fleet_on(stage)
    stage.news = {0: Look("a", 5, True), 1: Look("b", 5, True)}
    fleet.turn(1.0)
    fleet.drain(2.0)
    fleet.drain(3.0)  # asked again: the same
    assert stage.said() == [("stop", 0), ("stop", 1)]
    stage.news[0] = Ending(STOPPED, "")
    assert not fleet.turn(2.0 + deadlines.LEAVE / 2)
    assert fleet.turn(2.0 + deadlines.LEAVE)
    assert stage.said() == [("remove", 1)]


def test_what_is_wrong_with_all_of_them_ends_the_fleet_at_once(stage):
    fleet = fleet_on(stage)
    stage.news[1] = Ending(REFUSED, "--task=ant: expected another", ("--task", "ant", "another"))
    fleet.turn(1.0)
    assert stage.said() == [("stop", 0)]
    stage.news[0] = Ending(STOPPED, "")
    assert fleet.turn(1.5)
    assert isinstance(fleet.error, ConfigError)
    assert str(fleet.error) == "--task=ant: expected another"


def test_a_simulator_that_never_begins_ends_the_fleet_after_some_tries(stage):
    fleet, now = fleet_on(stage, 1), 0.0
    for _ in range(TRIES):
        assert fleet.error is None
        stage.news[0] = Ending(FAILED, "OSError: no display")
        over = fleet.turn(now)
        now += 100.0
        over = over or fleet.turn(now)
    assert over
    assert isinstance(fleet.error, RunError)
    assert str(fleet.error) == f"actor 0 failed {TRIES} times in a row: OSError: no display"


def test_once_somebody_has_stepped_one_bad_machine_is_tried_for_ever(stage):
    fleet, now = fleet_on(stage), 0.0
    stage.news[0] = Look("a", 1, True)
    for _ in range(3 * TRIES):
        now += 100.0
        stage.news[1] = Ending(REFUSED, "--task=ant: expected packages", ("--task", "ant", "packages"))
        assert not fleet.turn(now)
        assert not fleet.turn(now + 61.0)
        assert stage.said() == [("place", 1)]
    assert fleet.error is None


def test_the_status_says_who_has_no_place_and_who_has_no_learner(stage):
    fleet = fleet_on(stage, 4)
    looking = Look("b", 0, False, "unavailable: refused; next attempt at h:1 in 3.2 s")
    stage.news = {0: Look("a", 0, True), 1: Look("a", 0, True), 2: looking, 3: None}
    fleet.turn(1.0)
    status = "2 of 4 acting on 1 node, 1 without a learner (unavailable: refused), 1 starting, or waiting for room"
    assert fleet.lines[-1] == status
    count = len(fleet.lines)
    stage.news[2] = looking._replace(said="unavailable: refused; next attempt at h:1 in 7.9 s")
    stage.news[0] = Look("a", 300, True)
    fleet.turn(2.0)
    assert len(fleet.lines) == count  # nothing new
    fleet.turn(61.0)
    assert fleet.lines[-1] == f"{status}; 20 env steps/s"


# -- one actor ------------------------------------------------------------------------------------------------------


def hosted(address, **more):
    """A host's thread, and where its ending comes."""
    host, ending = FleetHost(ActorOptions(address, "counter", 2, {}, **more)), []
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
        assert host.look("here") == Look("here", 3, True, f"connected to {address} as actor 1")
        host.leave()
        step = env.step(torch.zeros(4, 2))
        thread.join(10)
        assert ending == [Ending(STOPPED, "")]
        wait_until(lambda: env.table.live == 1)
        assert step.valid[:2].all()


def broken(num_envs, device):
    raise OSError("no display\nat all")


def test_a_host_tells_errors_and_the_end(tmp_path):
    address = f"unix:{tmp_path}/s"
    assert FleetHost(ActorOptions(address, "no_such_task", 2, {})).run().setting[0] == "--task"
    assert FleetHost(ActorOptions(address, "test_fleet:broken", 2, {})).run() == Ending(FAILED, "OSError: no display")
    with remote(address, [make_sim("counter", 2, {})], 4) as env:
        _, thread, ending = hosted(address)
        wait_until(lambda: env.table.live == 2)
        env.close()
        thread.join(10)
        assert ending == [Ending(OVER, "the run has ended")]


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


def test_of_ray_s_words_one_sentence_says_why():
    reported = """The actor died unexpectedly before finishing this task.
    \tclass_name: Located
    \tactor_id: 01
    The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR, and so on. And on."""
    assert reason(RuntimeError(reported)) == "The actor is dead because its worker process has died"
    assert reason(RuntimeError("")) == "RuntimeError"


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
        assert "was lost: " in log.read_text()
        fleet.send_signal(signal.SIGTERM)
        wait_until(lambda: env.table.live == 0 or bool(parts.schedule.tick()), deadlines.LEAVE + 20)
        assert fleet.wait(deadlines.LEAVE + 20) == 130
        env.close()
    finally:
        fleet.kill()
        print(log.read_text())


def where(log: Path) -> dict[str, str]:
    """Of each of the fleet's actors the newest node."""
    return dict(re.findall(r"actor (\d+) is on \S+ \(node (\w+)\)", log.read_text()))
