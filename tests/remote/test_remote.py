"""Remote actors: the wire format, the learner's side, and access control."""

import re
import shlex
import subprocess
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest
import torch
from conftest import small_config
from late import cells
from remotes import Late, Raw, acting, quiet, remote, wait_until

from pql.config.compose import compose
from pql.contract.env import Box, ObsSpec, make_env
from pql.contract.spec_json import action_of
from pql.engine.executors import Inline
from pql.envs.toy import Counter
from pql.errors import ConfigError, RunError
from pql.remote import protocol
from pql.remote.actor.client import ActorClient
from pql.remote.actor.command import keywords
from pql.remote.actor.sims import Host, make_sim
from pql.remote.env import Remote
from pql.remote.process.far_build import describe_simulator
from pql.remote.server import check_safe
from pql.run.build import build
from pql.run.environment import build_env, describe_env
from pql.run.episodes import run_episodes
from pql.run.session import Session

COUNTER = {"restart_every": 4, "stagger": True}


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/s"


# -- wire format ------------------------------------------------------------------------------------------------------


def frames_of(sim, steps=9):
    """A simulator's packed messages, and what was packed."""
    layout = protocol.Layout(protocol.check_facts(describe_simulator(sim.spec)))
    stacks = {k: s.stack for k, s in sim.spec.obs.items()}
    first = protocol.newest_frames(sim.reset(1), stacks)
    yield layout, layout.pack_obs(7, 1, first), first
    for seq in range(2, steps):
        step = sim.step(np.zeros(layout.action_shape, layout.action_type))
        obs, final = (protocol.newest_frames(frames, stacks) for frames in (step.obs, step.final_obs))
        step = step._replace(obs=obs, final_obs=final)
        yield layout, layout.pack_step(7, seq, step), step


def test_pixel_actors_send_the_newest_frames_alone():
    """32 frames of 84 x 84 are 226 kB: no stack, no final observation where nothing ended."""
    facts = {
        "name": "pong",
        "num_envs": 32,
        "obs": {"policy": [[4, 84, 84], "uint8", 4, [], "zeros"]},
        "action": {"n": 6},
        "log": [],
        "max_episode_steps": 100,
        "autoreset": "same_step",
        "final_obs": "always",
        "info": {},
    }
    layout = protocol.Layout(protocol.check_facts(facts))
    obs = {"policy": np.zeros((32, 84, 84), np.uint8)}
    assert len(layout.pack_obs(1, 1, obs)) == 32 * 84 * 84 + 32


def test_frames_that_are_wrong_are_refused_in_words():
    (layout, _, _), (_, message, _) = list(frames_of(make_sim("counter", 5, {}), 3))
    body = protocol.unpack(message).body
    for broken, why in (
        (message[:20], "too short for a frame"),
        (b"grpc" + message[4:], "not a frame"),
        (message[:-1], "the header says"),
        (message[:4] + b"\x09\x00" + message[6:], "version 9"),
    ):
        with pytest.raises(protocol.ProtocolError, match=why):
            protocol.unpack(broken)
    with pytest.raises(protocol.ProtocolError, match="cut short"):
        layout.read_step(body[:-3])
    with pytest.raises(protocol.ProtocolError, match="too many"):
        layout.read_step(bytes(body) + b"x")
    with pytest.raises(protocol.ProtocolError, match="expected frame 4 of run 7, number 3"):
        protocol.expect(protocol.unpack(message), protocol.OBS, 7, 3)
    for spec in (["name"], "name num_envs", 5, {}):
        with pytest.raises(protocol.ProtocolError, match="specification"):
            protocol.check_facts(spec)
    facts = describe_simulator(make_sim("counter", 5, {}).spec)
    protocol.check_facts(facts | {"info": {"action_reach": [2.0] * facts["action"]["size"]}})
    with pytest.raises(protocol.ProtocolError, match="action is missing or wrong"):
        protocol.check_facts(facts | {"action": {"n": 3, "start": 0.5}})
    box = {"size": 1, "low": [-1.0], "high": [3.0], "center": [0.0]}
    assert action_of(protocol.check_facts(facts | {"action": box, "info": {}})["action"]) == Box(1, (-1,), (3,), (0,))
    with pytest.raises(protocol.ProtocolError, match="action is missing or wrong"):
        protocol.check_facts(facts | {"action": {**box, "center": [0.0, 1.0]}, "info": {}})
    with pytest.raises(protocol.ProtocolError, match="action is missing or wrong"):  # no float holds it
        protocol.check_facts(facts | {"action": {"size": 1, "low": [-(10**400)], "high": [1]}})
    group, nan = [[1], "float32", 1, [], "zeros"], float("nan")
    for name, value in (
        ("name", "x\x1b[2J"),
        ("name", "x\u202e"),
        ("obs", {"policy": group, "a\tb": group}),
        ("log", ["success\n"]),
        ("log", {"success": "often"}),
        ("log", {"success": ["sum"]}),
        ("action", {"size": 1, "low": [nan], "high": [1.0]}),
        ("info", {"action_reach": [1.0] * 9}),
        ("info", {"action_reach": ["wide"]}),
    ):  # an admitted actor's names and bounds are part of every checkpoint, whose readers refuse these
        with pytest.raises(protocol.ProtocolError, match=f"{name} is missing or wrong"):
            protocol.check_facts(facts | {name: value})
    with pytest.raises(protocol.ProtocolError, match="at most"):
        protocol.Layout(describe_simulator(make_sim("counter", 5, {}).spec) | {"num_envs": 10**7})


# -- the learner's side -----------------------------------------------------------------------------------------------


def test_remote_environments_do_what_local_ones_do(address):
    """The same rows as in this process, stacks, final observations and log terms included."""
    for name, kwargs in (("counter", {"restart_every": 3}), ("film:Film", {}), ("film:Film", {"fill": "first"})):
        local = make_sim(name, 3, kwargs)
        with remote(address, [make_sim(name, 3, kwargs) for _ in range(2)], 6) as env:
            assert env.spec.num_envs == 6
            assert env.spec.groups == 2
            shown = local.reset(0)
            mine = env.reset(0)
            for _ in range(11):
                for k in shown:
                    assert np.array_equal(mine[k], np.concatenate([shown[k]] * 2)), k
                action = np.zeros((3, 2), np.float32) if name == "counter" else np.zeros(3, np.int64)
                theirs, step = local.step(action), env.step(torch.from_numpy(np.concatenate([action] * 2)))
                for field in ("reward", "terminated", "truncated", "first", "final_ok", "valid"):
                    assert np.array_equal(getattr(step, field), np.tile(getattr(theirs, field), 2)), field
                over = theirs.first & theirs.final_ok
                for k, v in theirs.final_obs.items():
                    assert np.array_equal(step.final_obs[k][:3][over], v[over])
                for k, v in theirs.log.items():
                    assert np.array_equal(step.log[k], np.tile(v, 2))
                shown, mine = theirs.obs, step.obs


def test_targets_do_not_show_that_an_actor_was_late(address):
    """One of two actors is late with one answer in ten: the rows of both are those that the simulator makes."""
    sims = [make_sim("counter", 4, COUNTER), Late(make_sim("counter", 4, COUNTER), 0.1, 0.05)]
    algo = {"v_per_step": 0.25, "p_per_v": 1, "normalize_obs": False}
    with remote(address, sims, 8, wait=0.002) as env:
        parts = build(small_config(algo=algo), env=env, executor=Inline())
        parts.start()
        parts.warm_up(16)
        parts.begin()
        for _ in range(10):
            parts.schedule.tick()
        ring = parts.collector.replays[0]
    local = build(small_config(algo=algo, num_envs=4, task={"name": "counter", "kwargs": COUNTER}), executor=Inline())
    local.start()
    local.warm_up(80)
    theirs = local.collector.replays[0]
    assert int(ring.rule("valid", ring.flags.int()).sum()) == parts.env_steps >= 56 * 8
    rows = int(torch.cat((ring.live.head, theirs.live.head)).min()) - 3
    assert rows > 8  # of the late one; how many is a question of the clock
    mine = ring.windows(ring.live, *cells(ring, rows), 3, 0.9)
    row, column, head = cells(theirs, rows)
    other = theirs.windows(theirs.live, row, column, head, 3, 0.9)
    for name in ("reward", "discount", "mask"):
        one, two = (getattr(b, name) * b.mask for b in (mine, other))
        one, two = one.view(rows, 2, 4), two.view(rows, 1, 4)
        assert torch.equal(one, two.expand_as(one)), name


def test_a_new_actor_takes_the_slots_of_one_that_is_gone(address):
    """Its first row is a filler that begins an episode; the run has gone on meanwhile."""
    with remote(address, [make_sim("counter", 4, {})], 8, groups=2) as env:
        raw, sim = Raw(address), make_sim("counter", 4, {})
        raw.hello(sim, run_id=5)
        raw.hear()
        wait_until(lambda: env.table.live == 2)
        answer = threading.Thread(target=answer_resets, args=(raw, sim, 5))
        answer.start()
        obs = env.reset(0)
        answer.join()
        assert env.present().all()
        slots = env.table.actors[1].slots
        env.send(torch.zeros(8, 2), torch.arange(8))
        raw.hear()
        raw.close()  # with an action in hand
        took = wait_until(lambda: env.table.live == 1)
        with acting(address, make_sim("counter", 4, {})):
            took += wait_until(lambda: env.table.live == 2)
            assert took < 2.0
            group = int(slots[0]) // 4
            ids, step = env.answers(group)
            while not len(ids):
                ids, step = env.answers(group)
            assert ids.tolist() == slots.tolist()
            assert step.first.all()
            assert not step.valid.any()
            assert not (step.terminated | step.truncated).any()
            assert torch.equal(step.obs["policy"], obs["policy"][slots])
            env.close()


def answer_resets(raw, sim, run_id):
    order = raw.hear()
    assert order.kind == protocol.RESET
    layout = protocol.Layout(describe_simulator(sim.spec))
    raw.say(layout.pack_obs(run_id, order.seq, sim.reset(0)))


def test_late_actors_are_admitted_and_the_run_does_not_wait_for_them(address):
    with remote(address, [make_sim("counter", 2, {})], 6) as env:
        assert env.spec.groups == 2
        parts = build(small_config(num_envs=6, algo={"v_per_step": 0.25, "p_per_v": 1}), env=env, executor=Inline())
        parts.start()
        assert env.present().tolist() == [True, True, False, False, False, False]
        parts.warm_up(8)
        parts.begin()
        parts.schedule.tick()
        heads = parts.collector.replays[0].live.head
        assert int(heads[:2].sum()) >= 8 * 6
        assert int(heads[2:].sum()) == 0
        with acting(address, make_sim("counter", 2, {})):
            wait_until(lambda: env.table.live == 2)
            for _ in range(4):
                parts.schedule.tick()
            assert int(heads[3:5].min()) > 4  # in the other half, where all its environments find room
            assert env.measures() == {"remote/actors": 2, "remote/envs": 4, "remote/admitted": 2}
            env.close()


def test_slots_without_an_actor_are_no_episodes(address):
    """Neither those that stay empty, nor the filler row with which a late actor begins."""
    ending, late = (make_sim("counter", 2, {"restart_every": 4}) for _ in range(2))
    with remote(address, [ending], 6) as env, ExitStack() as more:
        joins, plain = iter(range(100)), env.step

        def step(action):
            if next(joins) == 1:
                more.enter_context(acting(address, late))
                wait_until(lambda: env.table.live == 2)
            return plain(action)

        env.step = step
        result = run_episodes(env, lambda obs: torch.zeros(6, 2), seed=3)
        assert len(result.returns) == 4
        assert min(result.lengths) > 0
        assert next(joins) < 70  # it does not wait for actors that never joined
        env.close()


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("reward", r"step\(\) to return what its spec says, but reward has shape \[2, 1\], expected \[2\]"),
        ("obs", r"reset\(\) to return what its spec says, but obs\[policy\] has shape \[2, 3\], expected \[2, 2\]"),
        ("groups", r"reset\(\) to return what its spec says, but obs has groups \['state'\], expected \['policy'\]"),
    ],
)
def test_an_actor_says_which_answer_is_not_as_its_specification_says(address, slip, words):
    """A column of rewards has the bytes of a row of them, so the learner cannot see it."""
    sim = make_sim("counter", 2, {})
    reset, step = sim.reset, sim.step
    if slip == "reward":
        sim.step = lambda action: (now := step(action))._replace(reward=now.reward[:, None])
    else:
        name, width = ("policy", 3) if slip == "obs" else ("state", 2)
        sim.reset = lambda seed=None: {name: np.zeros((2, width), np.float32) + reset(seed)["policy"][:, :1]}
    with acting(address, sim) as ended, closing(Remote(2, listen=address, timeout=2.0)) as env:
        with suppress(RunError):
            env.reset(0)
            env.step(torch.zeros(2, 2))
        wait_until(lambda: ended)
    assert isinstance(ended[0], ConfigError)
    assert re.fullmatch(rf"--task=counter: expected {words}: pql doctor --env NAME tests it", str(ended[0]))


class Numbers(Counter):
    """The counter with its observation in other types, too."""

    def __init__(self, num_envs):
        super().__init__(num_envs, stagger=True)
        kinds = {k: getattr(torch, k) for k in ("uint8", "int8", "int16", "int32", "int64", "bool")}
        self.kinds = {"policy": torch.float32, **kinds}
        self.spec = replace(self.spec, obs={k: ObsSpec((2,), kind) for k, kind in self.kinds.items()})

    def _typed(self, obs):
        return {k: obs["policy"].to(kind) for k, kind in self.kinds.items()}

    def reset(self, seed=None):
        return self._typed(super().reset(seed))

    def step(self, action):
        step = super().step(action)
        return step._replace(obs=self._typed(step.obs), final_obs=self._typed(step.final_obs))


def test_observations_of_every_type_arrive_as_they_were(address):
    with remote(address, [Host(Numbers(3))], 3) as env:
        assert {k: s.dtype for k, s in env.spec.obs.items()} == Numbers(3).kinds
        obs = env.reset(0)
        for _ in range(9):
            assert all(torch.equal(obs[k], obs["policy"].to(s.dtype)) for k, s in env.spec.obs.items())
            step = env.step(torch.zeros(3, 2))
            assert all(torch.equal(v, step.final_obs["policy"].to(v.dtype)) for v in step.final_obs.values())
            obs = step.obs
        env.close()
    assert protocol.FrameReader(memoryview(bytes([0, 7, 1]))).array("bool", (3,)).tolist() == [False, True, True]


def test_evaluation_says_whom_it_waits_for(address):
    with remote(address, [make_sim("counter", 2, {})], 2, eval_envs=3, timeout=1) as env:
        with pytest.raises(RunError, match="no actor with --role eval at"):
            env.beside().reset(3)
        env.reset(0)  # training has its own


def test_evaluation_has_slots_of_its_own(address):
    with remote(address, [make_sim("counter", 2, {})], 2, eval_envs=3) as env:
        beside = env.beside()
        assert beside.spec.num_envs == 3
        with acting(address, make_sim("counter", 3, {}), role="eval"):
            obs = beside.reset(3)
            assert obs["policy"].tolist() == [[0, 0]] * 3
            assert beside.step(torch.zeros(3, 2)).obs["policy"][1].tolist() == [0, 1]
            assert env.table.live == 1
            env.close()
    with remote(address, [make_sim("counter", 2, {})], 2) as env:
        assert env.beside() is None
        with acting(address, make_sim("counter", 3, {}), role="eval") as ended:
            wait_until(lambda: ended)
            assert "eval_envs" in str(ended[0])


def test_the_run_waits_for_its_first_actor_and_gives_up(address, capsys):
    with pytest.raises(RunError, match=r"no actor connected .* within 0.1 s"):
        Remote(4, listen=address, timeout=0.1)
    assert f"pql actor --connect {address} --num-envs K --task NAME" in capsys.readouterr().err
    with acting(address, make_sim("counter", 2, {}), patience=0.1):
        env = Remote(2, listen=address, timeout=0.3)
        env.reset(0)
        env.table.leave(env.table.actors[0])
        with pytest.raises(RunError, match="no actor at"):
            env.step(torch.zeros(2, 2))
        env.close()


def test_an_actor_s_patience_begins_when_its_learner_is_gone(address):
    with acting(address, make_sim("counter", 2, {}), patience=0.5):
        env = Remote(2, listen=address)
        time.sleep(0.7)  # it was let in, and no step was asked of it yet
        env.server._on_loop(env.server._server.stop(None))  # no actor sends a goodbye
        env.server._stop_loop()
        again = Remote(2, listen=address, timeout=5)
        assert again.reset(0)["policy"].shape == (2, 2)
        again.close()


# -- access control ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("pendulum", 2, "--task=pendulum: .*obs of these environments"),
        ("counter", 5, "--num-envs=5: .*at most 4, its number of slots"),  # more than there can ever be
    ],
)
def test_other_environments_are_refused_by_name(address, name, count, said):
    with remote(address, [make_sim("counter", 2, {})], 4), acting(address, make_sim(name, count, {})) as ended:
        wait_until(lambda: ended)
    assert isinstance(ended[0], ConfigError)
    assert re.search(said, str(ended[0]))


def test_more_environments_than_slots_wait_for_room(address):
    with remote(address, [make_sim("counter", 4, {})], 5):
        raw = Raw(address)
        raw.hello(make_sim("counter", 2, {}))
        assert raw.refusal() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "2 environments, but 1 of 5 slots are free")
        raw.close()


@pytest.mark.fault(24, cases=(60, 2000))
def test_garbage_ends_its_own_stream_alone(address, cases):
    """Random bytes, frames cut or changed at random, in place of a HELLO and of an answer."""
    rng, sim = np.random.RandomState(3), make_sim("counter", 2, {})
    layout = protocol.Layout(describe_simulator(sim.spec))
    with remote(address, [make_sim("counter", 2, {})], 64) as env:
        env.reset(0)
        start = env.table.actors[0]
        for i in range(cases):
            raw = Raw(address)
            good = protocol.pack_json(protocol.HELLO, 1, 0, {"spec": describe_simulator(sim.spec), "role": "train"})
            if i % 2:
                raw.say(good)
                raw.hear()
                order = raw.hear()
                good = layout.pack_obs(1, order.seq, sim.reset(0))
            bad = bytearray(rng.bytes(rng.randint(0, 200)) if i % 3 == 0 else good)
            if i % 3 == 1:
                bad = bad[: rng.randint(len(bad))]
            elif i % 3 == 2:
                places = [p for p in range(32) if not 8 <= p < 16]  # the header; a HELLO may name any run
                bad[rng.choice(places)] ^= 1 << rng.randint(8)
            raw.say(bytes(bad))
            assert raw.refusal()[0] == grpc.StatusCode.INVALID_ARGUMENT
            raw.close()
        assert env.table.actors[0] is start
        wait_until(lambda: env.table.live == 1)
        assert env.step(torch.zeros(64, 2)).valid[:2].all()


def read_as_the_learner(message, layout):
    frame = protocol.unpack(message)
    if frame.kind == protocol.HELLO:
        protocol.Layout(protocol.check_facts(protocol.read_json_frame(frame.body).get("spec")))
    elif frame.kind == protocol.OBS:
        layout.read_obs(frame.body)
    else:
        layout.read_step(protocol.expect(frame, protocol.STEP, 7, frame.seq).body)


@pytest.mark.fault(24, cases=(600, 20_000))
def test_damaged_frames_are_read_as_frames_or_refused(cases):
    """Bits flipped, ends cut, bytes added, noise: as the learner reads them, without a connection."""
    rng, sim = np.random.RandomState(4), make_sim("counter", 3, COUNTER)
    packed = list(frames_of(sim))
    layout, facts = packed[0][0], {"spec": describe_simulator(sim.spec), "role": "train"}
    good = [protocol.pack_json(protocol.HELLO, 7, 0, facts), *(message for _, message, _ in packed)]
    refused = 0
    for i in range(cases):
        message = bytearray(good[rng.randint(len(good))])
        if i % 4 == 0:
            for _ in range(rng.randint(1, 9)):
                message[rng.randint(len(message))] ^= 1 << rng.randint(8)
        elif i % 4 == 1:
            message = message[: rng.randint(len(message))]
        elif i % 4 == 2:
            message[12:12] = rng.bytes(rng.randint(1, 40))
        else:
            at = rng.randint(len(message))
            message[at : at + 16] = rng.bytes(len(message[at : at + 16]))
        try:
            read_as_the_learner(bytes(message), layout)
        except protocol.ProtocolError:
            refused += 1
    assert 0.5 * cases < refused < cases


def test_beyond_this_machine_it_takes_a_token_and_tls(tmp_path):
    assert check_safe("127.0.0.1:5555", None, None, None) is None
    with pytest.raises(ConfigError, match=r"token_file=null.*0.0.0.0:5555 can be reached from other machines"):
        check_safe("0.0.0.0:5555", None, None, None)
    with pytest.raises(ConfigError, match="cert=null"):
        check_safe("0.0.0.0:5555", "secret", None, None)
    with pytest.raises(ConfigError, match="both cert and key"):
        check_safe("0.0.0.0:5555", "secret", tmp_path / "c", None)
    with pytest.raises(ConfigError, match="--ca"):
        ActorClient("far.away:5555", make_sim("counter", 2, {}), token="secret")


@pytest.mark.fault(24)
def test_a_token_and_tls(tmp_path):
    files = {k: str(tmp_path / f"{k}.pem") for k in ("cert", "key")}
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    words += f" -addext subjectAltName=DNS:localhost -keyout {files['key']} -out {files['cert']}"
    made = subprocess.run(words.split(), capture_output=True)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    (tmp_path / "token").write_text("secret\n")
    ready = {}

    def serve():
        ready["env"] = Remote(4, listen="localhost:0", token_file=str(tmp_path / "token"), **files)

    # The address is known only once the server is up, which the first actor lets the constructor return from.
    import pql.remote.env as module

    tell = []
    plain, module.ActorServer = module.ActorServer, lambda *a, **k: tell.append(plain(*a, **k, tell=quiet)) or tell[0]
    try:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        wait_until(lambda: tell)
    finally:
        module.ActorServer = plain
    address, sim, cert = tell[0].address, make_sim("counter", 2, {}), (tmp_path / "cert.pem").read_bytes()
    with pytest.raises(ConfigError, match=r"--token-file=\.\.\..*a wrong token, or none"):
        ActorClient(address, sim, token="guess", ca=cert, tell=quiet).run()
    with pytest.raises(RunError, match="no learner"):
        ActorClient(address, sim, token="secret", patience=0.2, tell=quiet).run()  # no TLS
    with acting(address, sim, token="secret", ca=cert) as ended:
        thread.join(10)
        assert ready["env"].reset(0)["policy"].shape == (4, 2)
        ready["env"].close()
    assert ended == {0: None}


def test_make_env_names_what_is_wrong(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\x00")
    (tmp_path / "y").write_text("")
    x, y = (str(tmp_path / k) for k in "xy")
    for kwargs, why in (
        ({"groups": 3}, "groups=3: expected null, or a divisor of num_envs=4"),
        ({"groups": 0}, "groups=0"),
        ({"token_file": x}, "token_file=.*expected a token"),
        ({"token_file": y}, "token_file=.*expected a token"),
        ({"token_file": "/no/file"}, "token_file=/no/file: expected a file that can be read"),
        ({"cert": x, "key": "/no/key"}, "key=/no/key"),
        ({"cert": x, "key": x}, "key=.*PRIVATE KEY"),
        ({"wait": -1}, "wait=-1"),
        ({"timeout": 0}, "timeout=0"),
        ({"eval_envs": 1.5}, "eval_envs=1.5"),
        ({"listen": "unix:/no/such/folder/s"}, "listen="),
    ):
        with pytest.raises(ConfigError, match=why):
            make_env("remote", 4, **kwargs)


def test_the_variable_s_token_is_checked_and_not_shown(monkeypatch):
    monkeypatch.setenv("PQL_TOKEN", "h\u00fcsh")
    with pytest.raises(ConfigError, match=r"PQL_TOKEN=\.\.\.: expected a token") as error:
        make_env("remote", 4)
    assert "sh" not in str(error.value).replace("openssl", "")


def test_an_actor_takes_a_step_no_longer_than_its_simulator(address):
    """A slow simulator delays no other: the other half continues."""
    slow = Late(make_sim("counter", 2, {}), 1.0, 0.2)
    with remote(address, [make_sim("counter", 2, {}), slow], 4, wait=0.0) as env:
        parts = build(small_config(num_envs=4, algo={"v_per_step": 0.25, "p_per_v": 1}), env=env, executor=Inline())
        parts.start()
        parts.warm_up(10)
        heads = parts.collector.replays[0].live.head.tolist()
        assert sum(heads) >= 40
        assert max(heads) > 3 * min(heads)


# -- a task's own presets ---------------------------------------------------------------------------------------------


def test_actors_step_a_task_that_keeps_its_presets(address, capfd, monkeypatch):
    """The printed command starts actors that step the same environments as the task would in this process."""
    words = [
        "device=cpu",
        "task=atari",
        "task.game=breakout",
        "algo=impala",
        "num_envs=4",
        f"task.remote.listen={address}",
    ]
    config = compose([*words, "task.remote.timeout=20"])
    assert config == replace(compose(words[:-1]), task=config.task)
    asked = []

    def remote(num_envs, device, **kwargs):
        asked.append((num_envs, kwargs))
        return Counter(num_envs, device)

    monkeypatch.setattr("pql.remote.env.Remote", remote)
    build_env(config)
    ((slots, given),) = asked
    assert (slots, given["listen"], given["timeout"]) == (4, address, 20)
    name, *settings = shlex.split(given["task"])
    assert name == "atari"
    assert keywords(settings) == {
        "game": "breakout",
        "noop_max": 30,
        "sticky": 0.0,
        "full_actions": False,
        "life_loss": True,
    }
    assert describe_env(config) is None


def test_unrolls_of_a_task_by_actors_one_of_which_is_late(address):
    small = ["algo.encoder.channels=[4]", "algo.encoder.features=8", "algo.horizon=5", "algo.warmup_steps=2"]
    config = compose(["device=cpu", "task=catch", "algo=impala", "num_envs=8", *small, f"task.remote.listen={address}"])
    sims = [make_sim("catch", 4, {}), Late(make_sim("catch", 4, {}), 0.3, 0.02)]
    with acting(address, *sims):
        parts = build(config, executor=Inline())
        parts.start()
        wait_until(lambda: parts.env.table.live == 2)
        parts.warm_up(2)
        parts.begin()
        store, learner = parts.collector.stores[0], parts.learners["learner"]
        apart = 0
        for _ in range(12):
            parts.schedule.tick()
            apart += store.rollout.row[store.place].unique().numel() > 1
        parts.close_envs()
    assert parts.config.algo.gamma == 0.9  # catch's own
    assert int(learner.state.reader.taken) >= 10 * 8
    assert apart > 2  # ticks after which environments were at rows of their own
    metrics = parts.jobs["learner"].metrics.drain()
    assert 1 <= metrics["lag/rows_mean"] <= metrics["lag/rows_max"]


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["task=remote", "task.kwargs.listen=0.0.0.0:0"], "task.kwargs.token_file"),
        (["task=cartpole", "task.remote.listen=0.0.0.0:0"], "task.remote.token_file"),
    ],
)
def test_what_is_to_be_given_has_its_whole_name(words, setting, tmp_path):
    with pytest.raises(ConfigError) as error:
        Session(compose([*words, "num_envs=4", f"run_dir={tmp_path}/run", "device=cpu"]))
    assert error.value.setting == setting


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=remote", "task.remote.wait=1"], "task.remote={'wait': 1}: expected nothing with task=remote"),
        (["task.remote.wait=1", "task.process.python=python3"], "task.process.python=python3: expected null: actors"),
    ],
)
def test_who_steps_a_task_is_said_once(words, message):
    with pytest.raises(ConfigError) as caught:
        compose(["device=cpu", "algo=sac", *words])
    assert message in str(caught.value)
