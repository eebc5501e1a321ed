"""Env slice: environments that step together, from the observation that is acted on to the row that is written.

A collector has one slice or, if its simulator steps in groups, one per group; while one slice's actions are computed,
another's environments step. A slice owns only its graphs. All tensors it writes are views of the collector's, so a
run's state does not depend on the number of slices.

This file knows nothing of schedules or checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pql.collect.asynchronous import masked_update
from pql.collect.nonfinite import floats, mask_and
from pql.contract.env import Discrete, MultiDiscrete, capturable
from pql.contract.optional import Capturable, GroupedEnv
from pql.contract.rules import check_answer
from pql.data.normalize import ALL
from pql.engine import watchdog
from pql.engine.graph import Capture, Graph, make_graph
from pql.types import Step

if TYPE_CHECKING:
    from pql.collect.collector import Collector


class EnvSlice:
    """Acts, sends, receives and records for a range of a collector's environments.

    Args:
        collector: the collector whose policy, simulator, stores, statistics and generator are used.
        columns: the range; None: every environment, of a simulator that steps all at once.
        capture: capture acting and recording in CUDA graphs, or in one graph with the simulator's step between them if
            it can be captured (``Capturable``).
    """

    def __init__(self, collector: "Collector", columns: slice | None, capture: Capture):
        self.env, self.normalizer, self.stores = collector.env, collector.normalizer, collector.stores
        self.box, self.quarantine = collector.box, collector.quarantine
        self.gen, self.device = collector.gen, collector.device
        self.actor, self.episodes, self.obs = collector.actor, collector.episodes, collector.obs
        self.title = f"the simulator {self.env.spec.name}"
        self.saturation = collector.saturation
        self.columns, self.ids = ALL, None
        self.places: list[Tensor | None] = [None for _ in self.stores]
        if columns is not None:
            self.actor, self.episodes = collector.actor.part(columns), collector.episodes.part(columns)
            self.obs = {k: v[columns] for k, v in collector.obs.items()}
            self.quarantine = collector.quarantine.part(columns)
            self.saturation = collector.saturation and collector.saturation.part(columns)
            self.columns, self.ids = columns, torch.arange(collector.env.spec.num_envs)[columns]
            self.places = [self.ids.to(store.device) for store in self.stores]
        # With late answers: the environments that the next act or record applies to.
        self.mask = (
            torch.zeros(len(self.obs["policy"]), dtype=torch.bool, device=self.device) if collector.late else None
        )
        self.made = floats((self.actor.action, self.actor.record(self.actor.action.device), self.actor.memory))
        self.bridged = self.env.spec.stream == "default" and self.device.type == "cuda"
        self.now: Step | None = None
        self.checked = False  # that steps are as the specification says
        # A copy to another device joins that device's current stream, which is not allowed during capture.
        here = all(store.device == self.actor.action.device for store in self.stores)
        alone = here and self.ids is None and not self.bridged and Graph.possible(self.device)
        whole_step = capture != "off" and alone and capturable(self.env)
        drawn = [self.gen, *(cast(Capturable, self.env).generators if whole_step else ())]
        part: Capture = "off" if whole_step else capture
        self._act = make_graph(self._act_body, self.device, [self.gen], _ActState(self), part, "acting")
        self._record = Graph(self._record_body, self.device, [], _RecordState(self), part if here else "off")
        self._step = Graph(self._step_body, self.device, drawn, _StepState(self), capture if whole_step else "off")
        self._answer: Step | None = None  # the captured step's output, at the graph's addresses

    def prepare(self) -> None:
        """Capture graphs if enabled. Call it before the first reset, while the stores are empty."""
        self._step.prepare()
        self._answer = self.now
        self._act.prepare()
        if self._record.capture:
            zero = torch.zeros(self.actor.action.shape[0], device=self.device)
            obs = {k: v.clone() for k, v in self.obs.items()}
            final = {k: v.clone() for k, v in self.obs.items()}
            log = {k: zero.clone() for k in self.env.spec.log}
            flags = [zero.bool() for _ in range(5)]
            self.now = Step(obs, zero, flags[0], flags[1], flags[2], final, flags[3], flags[4], log)
            self._record.prepare()

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def captured(self) -> bool:
        """Return True if :meth:`step` is one graph."""
        return self._step.graph is not None

    def step(self) -> None:
        """Choose actions with the policy, step the simulator, and record the row, in one graph."""
        self._step()
        watchdog.stepped()
        self.now = self._answer
        self.box.sent(self.actor.action)

    def act(self) -> None:
        """Choose actions with the policy."""
        self._act()

    def act_randomly(self) -> None:
        """Choose actions uniform in [-1, 1], or among all discrete ones."""
        action, kind = self.actor.action, self.env.spec.action
        with masked_update(self.actor, self.mask):
            if isinstance(kind, Discrete):
                action.random_(kind.n, generator=self.gen)
            elif isinstance(kind, MultiDiscrete):
                action.copy_(kind.random(len(action), self.gen))
            else:
                action.copy_(torch.rand(action.shape, generator=self.gen, device=self.device).mul_(2).sub_(1))

    def send(self) -> None:
        """Start the simulator's step, if it can be awaited later."""
        if self.ids is not None:
            self.box.sent(self.actor.action)
            with self.simulator():
                cast(GroupedEnv, self.env).send(self.actor.action, self.ids)

    def receive(self) -> None:
        """Wait for the step, and record its row."""
        if self.ids is None:
            self.box.sent(self.actor.action)
        with self.simulator():
            env = self.env
            step = env.step(self.actor.action) if self.ids is None else cast(GroupedEnv, env).recv()[1]
        watchdog.stepped()
        self.record(step)

    def record(self, step: Step) -> None:
        """Write the row of a step to the stores, and update the statistics."""
        self._check(step)
        if self.bridged:
            for tensor in named_step(step).values():
                tensor.record_stream(torch.cuda.current_stream(self.device))
        if self._record.graph is None:
            self.now = step
        else:
            self._load(step)
        self._record()

    def returned(self) -> dict[str, Tensor]:
        """Return the simulator's last step, by name; empty before the first."""
        return {} if self.now is None else {k: v.clone() for k, v in named_step(self.now).items()}

    def keep(self, obs: dict[str, Tensor]) -> None:
        """Set ``obs`` as the observation to act on next."""
        for k, v in self.obs.items():
            v.copy_(obs[k])

    def _act_body(self) -> None:
        with masked_update(self.actor, self.mask):
            self.actor.act(self.normalizer(self.obs), self.gen)
            self.quarantine.act(self.made, self.mask)
        if self.saturation is not None and self.actor.squashed is not None:
            self.saturation(self.actor.squashed, self.mask)

    def _record_body(self) -> None:
        assert self.now is not None
        step, shown = self.quarantine(self.now, self.obs, self.mask)
        for store, places in zip(self.stores, self.places, strict=True):
            late = () if self.mask is None else (self.mask.to(store.device, non_blocking=True),)
            store.insert(self.actor.record(store.device), step_to(step, store.device), places, *late)
        over = step.terminated | step.truncated
        # With next-step autoreset this is the final observation; where the simulator lost it, it is not a real frame.
        lost = over & ~step.final_ok & ~step.first if self.env.spec.final_obs == "never" else None
        fresh = mask_and(self.mask, None if lost is None else ~lost, shown)
        self.normalizer.observe(step.obs, fresh)
        self.normalizer.observe_reward(step.reward, over | step.first, step.valid, self.columns)
        self.episodes.update(step)
        with masked_update(self.actor, self.mask):
            self.actor.observe(step.first)
        self.keep(step.obs)

    def _step_body(self) -> None:
        self._act_body()
        step = self.env.step(self.actor.action)
        self._check(step)
        self.now = step
        self._record_body()

    def _check(self, step: Step) -> None:
        """Check the first step [n, ...] against the specification."""
        if not self.checked:
            check_answer("step", step, self.env.spec, len(self.obs["policy"]))
            self.checked = True

    def _load(self, step: Step) -> None:
        """Copy a simulator's step to the addresses that the captured recording reads, by name."""
        source = named_step(step)
        for name, target in named_step(self.now).items():
            target.copy_(source[name], non_blocking=True)

    @contextmanager
    def simulator(self) -> Iterator[None]:
        """Run the simulator's work inside on the stream it uses, ordered with the collector's before and after."""
        watchdog.touch(self.title)
        if not self.bridged:
            yield
            watchdog.touch()
            return
        # The simulator works on the legacy default stream, which PyTorch's side streams are not ordered with.
        current, default = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        default.wait_stream(current)
        with torch.cuda.stream(default):
            yield
        current.wait_stream(default)
        watchdog.touch()


class _ActState:
    """State that is restored after a warm-up of acting."""

    def __init__(self, lane: EnvSlice):
        self.lane = lane

    def state_dict(self) -> dict[str, Any]:
        return {"gen": self.lane.gen.get_state(), "actor": self.lane.actor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lane.gen.set_state(state["gen"].cpu())
        self.lane.actor.load_state_dict(state["actor"])


class _RecordState:
    """State that is restored after a warm-up of recording. Rows past a head are unused, so heads suffice."""

    def __init__(self, lane: EnvSlice):
        self.lane = lane

    def _cursors(self) -> dict[str, Tensor]:
        return {f"{i}.{j}": t for i, s in enumerate(self.lane.stores) for j, t in enumerate(s.positions())}

    def state_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "actor": self.lane.actor,
            "normalizer": self.lane.normalizer,
            "episodes": self.lane.episodes,
            "quarantine": self.lane.quarantine,
        }
        return {**{k: v.state_dict() for k, v in parts.items()}, "cursors": self._cursors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lane.actor.load_state_dict(state["actor"])
        self.lane.normalizer.load_state_dict(state["normalizer"])
        self.lane.episodes.load_state_dict(state["episodes"])
        self.lane.quarantine.load_state_dict(state["quarantine"])
        for k, t in self._cursors().items():
            t.copy_(state["cursors"][k])


class _StepState:
    """State that is restored after a warm-up of a whole step: acting, recording and the simulator."""

    def __init__(self, lane: EnvSlice):
        self.lane, self.act, self.record = lane, _ActState(lane), _RecordState(lane)

    def state_dict(self) -> dict[str, Any]:
        env: Any = self.lane.env
        obs = {k: v.clone() for k, v in self.lane.obs.items()}
        return {"act": self.act.state_dict(), "record": self.record.state_dict(), "env": env.state_dict(), "obs": obs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        env: Any = self.lane.env
        self.act.load_state_dict(state["act"])
        self.record.load_state_dict(state["record"])
        env.load_state_dict(state["env"])
        self.lane.keep(state["obs"])


def named_step(step: Step | None) -> dict[str, Tensor]:
    """Return a step's tensors by name: ``reward``, ``obs.policy``, ``log.speed`` ..."""
    assert step is not None
    out: dict[str, Tensor] = {}
    for field, part in step._asdict().items():
        out |= {f"{field}.{k}": v for k, v in part.items()} if isinstance(part, dict) else {field: part}
    return out


def step_to(step: Step, device: torch.device) -> Step:
    """Copy the step to ``device``; if it is there, return it."""
    if step.reward.device == device:
        return step
    move = {k: v.to(device, non_blocking=True) for k, v in step.obs.items()}
    final = {k: v.to(device, non_blocking=True) for k, v in step.final_obs.items()}
    rest = {
        f: getattr(step, f).to(device, non_blocking=True)
        for f in ("reward", "terminated", "truncated", "first", "final_ok", "valid")
    }
    return Step(obs=move, final_obs=final, log={}, **rest)
