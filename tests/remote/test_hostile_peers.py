"""Hostile peers on the wire: pickles in frames, and messages of the largest size from actors that were admitted."""

import json
import os
import pickle
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attackers
import grpc
import pytest
import torch
from payload import Payload, check_payload
from remotes import Raw, quiet, remote, wait_until

from pql.engine import deadlines
from pql.engine.placement import keep_freed_memory
from pql.errors import ConfigError, RunError
from pql.remote import protocol
from pql.remote.actor.client import ActorClient
from pql.remote.actor.sims import make_sim
from pql.remote.env import Remote
from pql.remote.process.far_build import describe_simulator
from pql.remote.server import ActorServer

STATUS = grpc.StatusCode


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/s"


def counters(num_envs=2):
    return make_sim("counter", num_envs, {})


def bodies(mark):
    """A pickle of the payload in every protocol, alone and where a JSON text or an array is expected."""
    for version in range(pickle.HIGHEST_PROTOCOL + 1):
        text = pickle.dumps(Payload(mark), version)
        yield from (text, b'{"spec": ' + text + b"}", b"\x93NUMPY\x01\x00" + text)


@pytest.mark.fault(16, form="frame to the learner", cases=(6, 20))
def test_a_pickle_from_an_actor_is_never_executed(address, tmp_path, cases):
    """In every frame that the learner reads: only that stream ends."""
    mark, rng = tmp_path / "executed", random.Random(0)
    texts, sim = list(bodies(mark)), counters()
    hello = {"spec": describe_simulator(sim.spec), "role": "train"}
    with remote(address, [counters()], 8) as env:
        env.reset(0)
        for i in range(cases):
            raw, body = Raw(address), rng.choice(texts)
            if i % 3 == 0:
                raw.say(protocol.pack(protocol.HELLO, 1, 0, body))
            else:
                raw.say(protocol.pack_json(protocol.HELLO, 1, 0, hello))
                assert raw.hear().kind == protocol.WELCOME
                raw.say(protocol.pack(protocol.OBS, 1, raw.hear().seq, body) if i % 3 == 1 else body)
            assert raw.refusal()[0] == STATUS.INVALID_ARGUMENT
            raw.close()
        wait_until(lambda: env.table.live == 1)
        assert env.step(torch.zeros(8, 2)).valid.tolist() == [True] * 2 + [False] * 6
    check_payload(mark)


@contextmanager
def answering(address, act):
    """Listen instead of a learner: ``act(requests, context)`` yields its messages."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handler = grpc.stream_stream_rpc_method_handler(act)
        service = grpc.method_handlers_generic_handler(protocol.SERVICE, {protocol.METHOD: handler})
        server.add_generic_rpc_handlers((service,))
        server.add_insecure_port(address)
        server.start()
        yield
        server.stop(0).wait()


@pytest.mark.fault(16, form="frame to an actor", cases=(4, 20))
def test_a_pickle_from_a_learner_is_never_executed(address, tmp_path, cases):
    """In every frame that an actor reads: it ends with an error, or ignores what it does not know."""
    mark, rng, due = tmp_path / "executed", random.Random(1), []

    def act(requests, context):
        run_id, (kind, body) = protocol.unpack(next(requests)).run_id, due[-1]
        yield protocol.pack(kind, run_id, 0, body)
        context.abort(STATUS.INVALID_ARGUMENT, "the end")

    with answering(address, act):
        texts = list(bodies(mark))
        for i in range(cases):
            due.append(((protocol.WELCOME, protocol.RESET, protocol.ACT, protocol.BYE)[i % 4], rng.choice(texts)))
            with pytest.raises((ConfigError, RunError)):
                ActorClient(address, counters(), patience=0.1, tell=quiet).run()
    check_payload(mark)


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("admits", "why"), [(False, "not answered this actor for 0.3 s"), (True, "sent no request for 0.4 s")]
)
def test_a_learner_that_says_nothing_is_given_up(address, monkeypatch, admits, why):
    """Its machine answers pings: the actor connects again."""
    release = threading.Event()
    monkeypatch.setattr(deadlines, "WELCOME", 0.3)
    monkeypatch.setattr(deadlines, "ORDER", 0.4)

    def act(requests, context):
        if admits:
            yield protocol.pack_json(protocol.WELCOME, protocol.unpack(next(requests)).run_id, 0, {"actor": 1})
        release.wait(60)

    def tell(line):
        said.append(line)
        if "next attempt" in line:
            client.leave.set()
            release.set()

    with answering(address, act):
        said = []
        client = ActorClient(address, counters(), tell=tell)
        assert client.run() is None
    assert f"the learner has {why}; next attempt" in said[-1]
    assert len(said) == 1 + admits


@pytest.mark.fault(30)
def test_patience_ends_also_while_a_learner_says_nothing(address):
    """An actor with ``--patience`` does not wait the ten minutes that a learner may take to answer."""
    release, said = threading.Event(), []

    def act(requests, context):
        release.wait(60)
        yield from ()

    with answering(address, act):
        client = ActorClient(address, counters(), patience=0.3, tell=said.append)
        with pytest.raises(RunError, match=r"no learner at .* for 0.3 s: the learner has not answered this actor"):
            client.run()
        release.set()
    assert (client.admitted, said) == (0, [])


@pytest.mark.fault(24, 30)
def test_an_actor_that_does_not_read_its_welcome_gives_its_slots_back(address, monkeypatch):
    """It answers pings; the answer is too large for the buffers on the way."""
    monkeypatch.setattr(deadlines, "HELLO", 0.5)
    real = protocol.pack_json
    with remote(address, [counters()], 4) as env:
        env.reset(0)
        monkeypatch.setattr(
            protocol, "pack_json", lambda *args: real(*args) + bytes((32 << 20) * (args[0] == protocol.WELCOME))
        )
        silent = Raw(address)
        silent.say(real(protocol.HELLO, 1, 0, {"spec": describe_simulator(counters().spec), "role": "train"}))
        wait_until(lambda: env.table.live == 2)
        wait_until(lambda: env.table.live == 1, 10)
        assert env.step(torch.zeros(4, 2)).valid.tolist() == [True] * 2 + [False] * 2
        silent.close()


@pytest.mark.fault(6)
def test_a_server_whose_thread_has_ended_is_an_error_and_no_wait(address, monkeypatch):
    closed = pytest.raises(RunError, match="the server for remote actors was closed")
    with remote(address, [counters()], 2) as env:
        env.reset(0)
        with monkeypatch.context() as patch:
            patch.setattr(ActorServer, "alive", False)
            with closed:
                env._stepper.check_alive()
        assert env.step(torch.zeros(2, 2)).valid.all()
    monkeypatch.setattr(ActorServer, "alive", False)
    with closed:
        Remote(2, listen=address, timeout=100)


def resident():
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.fault(35, count=20)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from Linux's /proc")
def test_the_largest_garbage_of_admitted_actors_leaves_nothing_and_disturbs_no_one(address, trial, request):
    """From eight connections at once; in the suite with 1 MB each."""
    cases = 8
    largest = protocol.LARGEST if request.config.option.faults else 1 << 20
    words = [address, trial, cases, largest, json.dumps(describe_simulator(counters().spec))]
    script = [sys.executable, attackers.__file__, *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    action = torch.zeros(2 + 2 * cases, 2)
    keep_freed_memory()  # as every run does
    with remote(address, [counters()], 2 + 2 * cases) as env:
        env.reset(0)
        good = env.table.actors[0]
        with subprocess.Popen(script, **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            assert env.table.live == 1 + cases
            before = resident()
            process.stdin.write("\n")
            process.stdin.close()
            served = 0
            while process.poll() is None:
                served += bool(env.step(action).valid[:2].all())
            ended = process.stdout.read().split("\n")[:-1]
        over = "RESOURCE_EXHAUSTED" if largest == protocol.LARGEST else "INVALID_ARGUMENT"
        refusals = {f"{largest} INVALID_ARGUMENT", f"{largest + 1} {over}"}
        assert len(ended) == cases
        assert {*ended} <= refusals
        assert served > 0
        # An idle gRPC keeps the last messages until its next event: a learner steps all the time.
        wait_until(lambda: bool(env.step(action).valid[0]) and resident() < before + 20, 10)
        wait_until(lambda: env.table.live == 1)
        assert [*env.table.actors.values()] == [good]
        assert env.step(action).valid.tolist() == [True] * 2 + [False] * 2 * cases
        newcomer = Raw(address)
        newcomer.hello(counters(), run_id=99)
        assert newcomer.hear().kind == protocol.WELCOME
        newcomer.close()
