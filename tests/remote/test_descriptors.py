"""Open files of a learner that listens: connections without the token cannot use them up."""

import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from remotes import acting

from pql.errors import ConfigError
from pql.remote import descriptors
from pql.remote.actor.sims import make_sim
from pql.remote.descriptors import FEWEST, SPARE, WAITING, connection_limit

# A learner that may open 300 files. On each line that it reads, it saves a checkpoint.
LEARNER = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from pql.engine import deadlines
deadlines.HELLO = 1.0  # instead of 10 s
import torch
from pql.remote.descriptors import open_files
from pql.remote.server import ActorServer
from pql.remote.slot_table import SlotTable
from pql.run.store.checkpoint import load, save
server = ActorServer("127.0.0.1:0", table := SlotTable(4), token="secret", tell=lambda line: None)
print(server.address, flush=True)
for line in sys.stdin:
    path = Path(sys.argv[1]) / line.strip()
    save(path, {"a": torch.zeros(3)}, {})
    load(path)
    print(open_files(), table.live, flush=True)
server.close()
"""


@pytest.mark.fault(24)
def test_idle_connections_leave_files_for_a_checkpoint_and_end_by_themselves(tmp_path):
    """400 connections that send nothing, to a process that may open 300 files; then an actor joins."""
    command = [sys.executable, "-c", LEARNER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process, ExitStack() as stack:
        stack.callback(process.kill)
        address = process.stdout.readline().strip()
        host, _, port = address.rpartition(":")

        def save(name):
            process.stdin.write(name + "\n")
            process.stdin.flush()
            return [int(word) for word in process.stdout.readline().split()]

        before = save("before")
        for _ in range(400):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        files, live = save("during")
        assert before[0] + 50 < files <= 300 - SPARE + 20
        assert live == 0
        with acting(address, make_sim("counter", 2, {}), token="secret", patience=30.0):
            end = time.monotonic() + 60
            while not live and time.monotonic() < end:
                time.sleep(0.05)
                _, live = save("later")
            assert live == 1
            process.stdin.close()  # the run has ended


@pytest.fixture
def limits():
    """Restores this process's limit of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised_as_far_as_needed(limits, monkeypatch):
    monkeypatch.setattr(descriptors, "open_files", lambda: 40)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    wanted = 64 + WAITING
    assert connection_limit(64, "here") == wanted
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 40 + SPARE + wanted


def test_a_hard_limit_leaves_fewer_connections_or_none(monkeypatch):
    given, hard = [], 1024
    monkeypatch.setattr(descriptors, "open_files", lambda: 40)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: given.append(both))
    assert connection_limit(4096, "here") == 1024 - SPARE - 40
    assert given == [(1024, 1024)]
    hard = 40 + SPARE + FEWEST - 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    with pytest.raises(ConfigError, match=rf"listen=here: expected a limit of at least {hard + 1} open files, it is"):
        connection_limit(64, "here")
