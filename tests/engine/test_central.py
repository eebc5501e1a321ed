"""Central parameters in chunks: one replica equals the plain optimiser, pushes of several are complete, turns hold."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pql.engine.central import Central, CentralOptimizer, ReplicaStopped, ReplicaTurns
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, Optimizer, RMSProp
from pql.nets.mlp import Layers, mlp

KINDS = {
    "adam": lambda flat: AdamW(flat, 1e-2, 0.5, weight_decay=0.1),
    "rmsprop": lambda flat: RMSProp(flat, 1e-2, 0.5),
}


def flat(seed=0):
    torch.manual_seed(seed)
    return Flat(mlp(7, Layers((20, 13)), 3), trained=True)  # 475 parameters: seven chunks of 64, and one of 27


def in_threads(work, numbers):
    """Run ``work(number)`` for every number in a thread of its own."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        list(pool.map(work, numbers))


@pytest.mark.parametrize("kind", KINDS)
def test_one_pusher_equals_the_plain_optimiser_bit_for_bit(kind):
    plain, mine = KINDS[kind](flat()), KINDS[kind](flat())
    central = Central(mine, chunk=50)
    assert [c.part.stop - c.part.start for c in central.chunks] == [64] * 7 + [27]
    pushing = CentralOptimizer(mine, central)
    gen = torch.Generator().manual_seed(1)
    for i in range(30):
        grad, skip = torch.randn(475, generator=gen), [None, torch.tensor(0.0), torch.tensor(1.0)][i % 3]
        norms = []
        for optimizer in (plain, pushing):
            optimizer.lr.fill_(1e-2 / (i + 1))
            optimizer.flat.data.grad.copy_(grad)
            norms.append(optimizer.step(skip))
        assert norms[0] == norms[1]
        assert torch.equal(plain.flat.data, pushing.flat.data)
        assert torch.equal(plain.flat.data, central.data)
    theirs, ours = plain.state_dict(), pushing.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k], ours[k]) for k in theirs)
    assert pushing.drain_lags() == Counter({0: 30})
    assert pushing.drain_lags() == Counter()


def test_a_restored_state_reaches_every_chunk():
    source, target = (CentralOptimizer(o, Central(o, 64)) for o in (KINDS["adam"](flat()), KINDS["adam"](flat(1))))
    for optimizer, steps in ((source, 3), (target, 1)):
        for _ in range(steps):
            optimizer.flat.data.grad.fill_(0.1)
            optimizer.step()
    target.load_state_dict({k: v.clone() for k, v in source.state_dict().items()})
    target.flat.data.data.copy_(source.flat.data)
    target.central.data.copy_(source.flat.data)
    for optimizer in (source, target):
        optimizer.flat.data.grad.fill_(0.3)
        optimizer.step()
    assert [int(c.state["count"]) for c in target.central.chunks] == [4] * 8
    assert torch.equal(source.flat.data, target.flat.data)
    other = CentralOptimizer(KINDS["adam"](flat()), source.central, number=1)
    assert list(other.state_dict()) == ["lr"]  # the first's checkpoint holds the rest


# -- threads --------------------------------------------------------------------------------------------------------


class Careless(Optimizer):
    """A rule far from atomic: it reads, waits, and writes back what it read plus the gradient, half by half."""

    def __init__(self, own):
        super().__init__(own, 1.0)
        self.total = torch.zeros_like(own.data, requires_grad=False)

    def rule(self, data, grad, state, skip):
        total, half = state["total"] + grad, data.numel() // 2
        time.sleep(1e-4)
        state["total"].copy_(total)
        data[:half] = total[:half]
        time.sleep(1e-4)
        data[half:] = total[half:]

    def state_dict(self):
        return {"lr": self.lr, "total": self.total}


class Open:
    """A lock that locks nothing."""

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def push_from_threads(locked, workers=4, pushes=30):
    """Each thread pushes ones and looks at what it has then. Returns the central side and the torn chunks seen."""
    central = Central(Careless(flat()), 64)
    central.data.zero_()
    torn = []
    if not locked:
        for chunk in central.chunks:
            chunk.lock = Open()

    def work(number):
        optimizer = CentralOptimizer(Careless(flat()), central, number=number)
        for _ in range(pushes):
            optimizer.flat.data.grad.fill_(1.0)
            optimizer.step()
            optimizer.pull()
            torn.extend(c.part for c in central.chunks if len(optimizer.flat.data[c.part].unique()) > 1)

    in_threads(work, range(workers))
    return central, torn


def test_no_update_is_lost_and_no_chunk_is_torn():
    central, torn = push_from_threads(locked=True)
    assert torch.equal(central.data, torch.full((475,), 4 * 30.0))
    assert central.pushes == 120
    assert torn == []


def test_the_check_sees_missing_locks():
    central, torn = push_from_threads(locked=False)
    assert (central.data < 120).any()
    assert torn


def test_every_chunks_count_is_the_number_of_gradients_in_its_moments():
    """With a constant gradient Adam's bias-corrected step is the learning rate, at any true count and at no other."""
    optimizer = AdamW(flat(), 1e-3)
    central = Central(optimizer, 64)
    central.data.zero_()

    def work(number):
        mine = CentralOptimizer(AdamW(flat(), 1e-3), central, number=number)
        for _ in range(25):
            mine.flat.data.grad.fill_(0.5)
            mine.step()

    in_threads(work, range(4))
    assert [int(c.state["count"]) for c in central.chunks] == [100] * 8
    torch.testing.assert_close(central.data, torch.full((475,), -0.1), rtol=1e-4, atol=0)


# -- turns and lag --------------------------------------------------------------------------------------------------


@pytest.mark.fault(25)
def test_lag_is_the_pushes_of_others_since_the_last_read():
    own = [RMSProp(flat(), 1e-3) for _ in range(3)]
    central = Central(own[0], 64)
    a, b, c = (CentralOptimizer(o, central, number=i) for i, o in enumerate(own))
    for one in (a, b, c):
        one.pull()
    for one in (a, b, a, a, c, b):  # seen: a 0; b 0; a 1; a 3; c 0; b 2
        one.step()
    c.pull()
    c.step()
    wanted = [Counter({0: 2, 1: 1}), Counter({1: 1, 3: 1}), Counter({4: 1, 0: 1})]
    assert [one.drain_lags() for one in (a, b, c)] == wanted


def test_turns_let_threads_by_in_their_order():
    turns, seen = ReplicaTurns(3), []

    def work(number):
        for _ in range(20):
            with turns.of(number):
                seen.append(number)

    in_threads(work, (2, 0, 1))
    assert seen == [0, 1, 2] * 20


def test_halted_turns_wake_who_waits_and_stop_who_comes():
    turns, caught = ReplicaTurns(2), []

    def wait():
        try:
            with turns.of(1):
                pass
        except ReplicaStopped as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    turns.halt()
    thread.join(5)
    wait()
    assert len(caught) == 2
    assert not isinstance(caught[0], Exception)  # code that reports errors must let it pass
