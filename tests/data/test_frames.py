"""Frame stacks of the replay ring: stored once, and sampled as the environment returned them."""

from dataclasses import replace

import pytest
import torch
from histories import CPU, Recorded

from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.contract.spec_json import spec_from_dict, spec_to_dict
from pql.data.frames import eights, put
from pql.data.sizes import ReplayLayout, preflight, replay_bytes
from pql.engine.tape import Tape
from pql.run.store.manifest import check_spec_dict

ATARI = {"policy": ObsSpec((4, 84, 84), torch.uint8, stack=4)}
KINDS = ("step", "step", "step", "terminate", "truncate", "life", "lose", "restart")


@pytest.mark.parametrize("head", [5, 40])
def test_frames_in_flight_are_never_read(head):
    """Cells without a row yet may hold anything; so may those that the writer takes next: a horizon's rows."""
    ring, rows = Recorded(2, 20, 3, depth=4), 20
    written = range(1, ring.replay.horizon + 1)
    for _ in range(head):
        ring.insert(["step"] * 2)
    ring.seal()
    drawn = min(head, rows - ring.replay.guard)
    steps = written if head > rows else range(1, rows - head + 1)
    taken, ahead = ([(head + i - k) % rows * 2 + c for i in steps for c in (0, 1)] for k in (1, 0))
    for store in ring.replay.obs.values():
        store[ahead if head > rows else ahead[:-2]] = 77  # the observation of row ``head`` itself is sealed
    ring.replay.flags[taken] = 11
    for store in (ring.replay.reward, ring.replay.action):
        store[taken] = torch.nan  # which may not even be multiplied by zero
    batch = ring.everything(1, 0.9)
    assert batch.mask.sum() == 2 * drawn
    ring.check(batch, 0, 1, 0.9)


def test_draws_of_stacks_are_captured():
    """As in a CUDA graph: no value is read back, and what is drawn follows the memory."""
    ring, gen = Recorded(2, 20, 3, depth=4), torch.Generator().manual_seed(0)
    ring.seal()
    with Tape([gen]) as tape:
        batch = ring.replay.sample(ring.cursor, 32, 3, 0.9, gen)
    for kind in ("step", "terminate", "truncate", "step", "step", "life"):
        ring.insert([kind, "step"])
        ring.seal()
        before = int(ring.cursor.lost)
        tape.replay()
        kinds = ring.check(batch, int(ring.cursor.lost) - before, 3, 0.9)
    assert {"plain", "final", "terminated"} <= set(kinds)


# --- memory ---


def test_a_million_frames_fit_in_7_2_gigabytes():
    for num_envs in (1, 32, 256, 1024):
        layout = ReplayLayout(ATARI, None, num_envs, 0, 4, True, torch.float32, ("q", "value"))
        rows = preflight(layout, 1_000_000, int(7.2e9))
        need = replay_bytes(replace(layout, rows=rows))
        assert rows == 1_000_000 // num_envs
        assert 7.05e9 < need * 1_000_000 / (rows * num_envs) <= 7.2e9


def test_a_million_histories_of_eight_times_48_numbers_take_a_sixth():
    groups = [{"policy": ObsSpec((384,), stack=count)} for count in (8, 1)]
    layouts = [ReplayLayout(group, 12, 4096, 1_000_000 // 4096, 3, True) for group in groups]
    assert [*map(replay_bytes, layouts)] == pytest.approx([0.245e9, 1.588e9], rel=1e-3)


def test_a_checkpoint_remembers_which_groups_are_stacks():
    for action in (Box(2), Discrete(6)):
        flat = ObsSpec((12,), stack=4, terms=(1, 2), fill="first")
        spec = EnvSpec("game", 1, {**ATARI, "state": ObsSpec((4,)), "flat": flat}, action, CPU)
        assert spec_from_dict(spec_to_dict(spec)).obs == spec.obs
        check_spec_dict(spec_to_dict(spec))
    assert "stack" not in spec_to_dict(spec)["obs"]["state"]  # as in checkpoints from before there were stacks


@pytest.mark.parametrize(
    ("rows", "wide"),
    [
        (torch.arange(5 * 4 * 64).view(5, 4, 8, 8).byte()[:, -1], True),  # a stack's newest frame
        (torch.arange(5 * 64).view(5, 64).byte(), True),
        (torch.arange(5 * 9).view(5, 3, 3).byte(), False),  # nine bytes a row
        (torch.arange(5 * 65).view(5, 65).byte()[:, 1:], False),  # rows that begin anywhere
        (torch.arange(5 * 65).byte()[1:321].view(5, 64), False),
        (torch.arange(5 * 64).view(64, 5).byte().T, False),
        (torch.arange(5.0 * 64).view(5, 64), False),
    ],
)
def test_rows_are_put_where_they_belong_whatever_their_layout(rows, wide):
    store, index = torch.zeros(9, *rows.shape[1:], dtype=rows.dtype), torch.tensor([7, 0, 3, 8, 4])
    assert (rows.dtype == torch.uint8 and eights(rows) is not None) == wide
    put(store, index, rows)
    assert torch.equal(store[index], rows)
    assert not store[[1, 2, 5, 6]].any()
