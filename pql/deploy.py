"""Runs an exported policy on a robot: ``Controller("policy.onnx")``. ::

    controller = Controller("policy.onnx", Limits(rate=6.0), log="walk.safetensors")
    controller.run(read, write, steps=500)  # or: command = controller.act(terms) in a loop of your own

It needs Python 3.8, NumPy and onnxruntime, and imports nothing of pql: this file may be copied to the robot's computer.
``docs/guides/sim_to_real.md`` describes its use, ``docs/export.md`` the robot's record that it reads.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

RUN, HOLD, DAMP = "run", "hold", "damp"


class Limits(NamedTuple):
    """Limits on commands.

    Attributes:
        rate: fastest change of a target, rad/s, for all joints or for each; None: free.
        clip: keep targets within the joints' limits.
        hold_after: age of an observation, in seconds, from which on the last target is held.
        damp_after: age from which on the joints are only damped (kp 0), until ``reset``.
    """

    rate: Any = None
    clip: bool = False
    hold_after: float = 0.1
    damp_after: float = 0.5


class JointCommand(NamedTuple):
    """A command for the joints' servos: torque = kp (target - position) - kd velocity.

    Attributes:
        target: [A] rad, or the simulator's actions where the export has no joints.
        kp, kd: gains, [A]; None if the simulator did not tell them.
        state: ``run``, ``hold`` (the observation is late or not finite) or ``damp``.
        action: [A], the simulator's action behind ``target``.
    """

    target: np.ndarray
    kp: np.ndarray | None
    kd: np.ndarray | None
    state: str
    action: np.ndarray


class Controller:
    """Turns measurements into joint targets with the policy of an ONNX file that ``pql export`` wrote.

    Args:
        policy: the file.
        limits: of the targets, and of the age of observations.
        log: file of the transitions, for ``replay.prefill`` and ``replay.demos``; ``save`` and ``close`` write it.
        session: an ``onnxruntime.InferenceSession`` of the file, or what has its methods; None: made here.
        clock: current time in seconds.

    Attributes:
        terms: names of the measurements for :meth:`act`: name -> (source, width).
        joints, default, scale: names [A], pose and rad per action [A]; ``joints`` is empty without a robot's record.
        all_joints, all_default: names and pose of the observed joints, as terms of joint positions have them.
        dt: seconds per step; None without a record.

    Raises:
        ValueError: the file is not an export of pql, or has actions in [-1, 1] instead of the simulator's.
    """

    def __init__(
        self,
        policy: Any,
        limits: Limits = Limits(),  # noqa: B008  immutable
        log: str | None = None,
        session: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._session = open_session(policy) if session is None else session
        text = self._session.get_modelmeta().custom_metadata_map.get("pql")
        self.metadata = json.loads(text or "{}")
        about = self.metadata.get("action", {})
        if about.get("kind") != "box":
            raise ValueError(f"{policy}: expected an export of pql with continuous actions")
        self._bounds = [vector(about[k]) for k in ("low", "high", "center") if about.get(k) is not None]
        if not about["scaled"] and not all((abs(end) == 1).all() for end in self._bounds[:2]):
            raise ValueError(f"{policy}: expected the simulator's actions: pql export RUN scale=true")
        robot = self.metadata["spec"].get("robot", {})
        size = about["size"]
        self.joints, self.dt = list(robot.get("joints", ())), robot.get("dt")
        self.default = vector(robot.get("default", [0.0] * size))
        self.scale = vector(robot.get("scale", [1.0] * size))
        self.all_joints, self.all_default = robot.get("all_joints", []), vector(robot.get("all_default", []))
        self.kp, self.kd = (vector(robot[k]) if k in robot else None for k in ("kp", "kd"))
        self.position_limits, self._clip = (
            vector(robot[k]).T if k in robot else None for k in ("limits", "target_clip")
        )
        self.limits, self._clock = check_limits(limits, self), clock
        self._groups = {k[4:]: i for k, i in by_name(self.metadata["inputs"]).items() if k.startswith("obs.")}
        self._layout = {k: robot.get("terms", {}).get(k) for k in self._groups}
        self.terms = terms_of(self._layout, self._groups, size)
        self._log = Log(log, self._unit) if log is not None else None
        self.reset()

    def reset(self, positions: Any = None) -> None:
        """Begin an episode: histories and a recurrent state are empty, the last action is 0, damping ends.

        Args:
            positions: [A] rad, the joints' positions now, from which ``limits.rate`` counts; None: the first target is
                free.
        """
        known = self.default if positions is None else vector(positions)
        if known.shape != self.default.shape or not np.isfinite(known).all():
            raise ValueError(f"positions={positions}: expected {len(self.default)} finite numbers, one for each joint")
        entries = self.metadata["inputs"]
        self._inputs = {i["name"]: np.zeros((1, *i["shape"][1:]), i["dtype"]) for i in entries}
        self._frames: dict[tuple[str, str], np.ndarray] = {}
        self._action = np.zeros_like(self.default)
        self._target = known.copy()
        self._free, self._started, self._damped, self._fresh = positions is None, False, False, self._clock()
        if self._log:
            self._log.cut()

    # -- a step ----------------------------------------------------------------------------------------------------

    def act(self, terms: Mapping[str, Any] | None, stamp: float | None = None, reward: float = 0.0) -> JointCommand:
        """Return the command for one step.

        Args:
            terms: measurements by name, as the simulator's functions compute them before clip and scale (joint
                positions relative to ``default``); None: nothing was measured. The last action is filled in here.
            stamp: time of the measurement on ``clock``; None: now.
            reward: of the step that led to these measurements, for the log.
        Raises:
            ValueError: a term is missing, unknown, or has another width.
        """
        now = self._clock()
        stamp = now if stamp is None else stamp
        given = None if terms is None else check_terms(terms, self.terms)
        whole = given is not None and all(np.isfinite(x).all() for x in given.values())
        if given is None or not whole or self._damped or now - stamp > self.limits.hold_after:
            return self._wait(now)
        obs = {k: self._group(k, given) for k in self._groups}
        before = dict(self._inputs)
        raw = self._policy(obs)
        if not all(np.isfinite(x).all() for x in (raw, *self._state())):
            self._inputs = before
            return self._wait(now)
        self._fresh = max(self._fresh, stamp)
        wanted = self.default + self.scale * raw
        wanted = wanted if self._clip is None else np.clip(wanted, *self._clip)  # as in the simulator
        target = self._limited(wanted)
        self._action = np.where(target == wanted, raw, (target - self.default) / self.scale).astype(np.float32)
        self._target, self._started, self._free = target, True, False
        if self._log:
            self._log.add(obs, self._action, reward, (now, target))
        return JointCommand(target, self.kp, self.kd, RUN, self._action)

    def _state(self) -> list[np.ndarray]:
        return [x for k, x in self._inputs.items() if k.startswith("state.")]

    def _policy(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        for k, x in obs.items():
            self._inputs["obs." + k][0] = x
        action, *after = self._session.run(None, self._inputs)
        self._inputs.update(zip([k for k in self._inputs if k.startswith("state.")], after))
        return np.asarray(action[0], np.float32)

    def _group(self, name: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return an observation group: terms clipped, scaled, with their histories (oldest first), joined."""
        layout = self._layout[name]
        if layout is None:
            return given[name].reshape(self._groups[name]["shape"][1:]).astype(self._groups[name]["dtype"])
        parts = []
        for term in layout:
            x = given.get(term["name"], self._action)
            if term["clip"] is not None:
                x = np.clip(x, *(np.array(end, np.float32) for end in term["clip"]))
            x = x * np.array(term["scale"], np.float32)
            if term["history"]:
                key = (name, term["name"])
                frames = self._frames.get(key, np.repeat(x[None], term["history"], 0))
                frames = self._frames[key] = np.concatenate((frames[1:], x[None]))
                x = frames.reshape(-1) if term["flatten"] else frames
            parts.append(x)
        return np.concatenate(parts, -1)

    def _limited(self, target: np.ndarray) -> np.ndarray:
        if self.limits.clip and self.position_limits is not None:
            target = np.clip(target, *self.position_limits)
        if self.limits.rate is not None and not self._free:
            most = np.float32(self.dt) * np.array(self.limits.rate, np.float32)
            target = np.clip(target, self._target - most, self._target + most)
        return target.astype(np.float32)

    def _wait(self, now: float) -> JointCommand:
        """Hold the last target, or damp; before the first observation, damp."""
        self._damped = self._damped or (self._started and now - self._fresh > self.limits.damp_after)
        if self._log:
            self._log.cut()
        if self._damped or not self._started:
            return self.damp()
        return JointCommand(self._target, self.kp, self.kd, HOLD, self._action)

    def damp(self) -> JointCommand:
        """Return a command without stiffness."""
        return JointCommand(self._target, None if self.kp is None else 0 * self.kp, self.kd, DAMP, self._action)

    def _unit(self, action: np.ndarray) -> np.ndarray:
        """Return the simulator's action [A] in [-1, 1], as the replay has it."""
        low, high, *center = self._bounds
        middle = center[0] if center else (low + high) / 2
        return np.clip((action - middle) / np.where(action < middle, middle - low, high - middle), -1, 1)

    # -- episodes --------------------------------------------------------------------------------------------------

    def finish(self, terms: Mapping[str, Any] | None = None, reward: float = 0.0, terminated: bool = False) -> None:
        """End the episode, and reset.

        Args:
            terms: the final measurements; without them the last step is not logged, as its successor is unknown.
            reward: of the last step.
            terminated: the task ended it (a fall); False: the time did.
        """
        given = None if terms is None else check_terms(terms, self.terms)
        if self._log and given is not None and all(np.isfinite(x).all() for x in given.values()):
            self._log.end({k: self._group(k, given) for k in self._groups}, reward, terminated)
        self.reset()

    def run(self, read: Callable[[], Any], write: Callable[[JointCommand], Any], steps: int) -> list[float]:
        """Control at the rate of training. If anything raises, the joints are damped first.

        Args:
            read: returns terms, or None.
            write: takes a command.
        Returns:
            Seconds from measurement to command, of each step.
        """
        if self.dt is None:
            raise ValueError("expected a robot's record with dt: call act in a loop of your own")
        due, used = self._clock(), []
        try:
            for _ in range(steps):
                began = self._clock()
                write(self.act(read(), began))
                used.append(self._clock() - began)
                due += self.dt  # a fixed rate: a late step does not delay the next ones
                late = self._clock() - due
                due = due if late < self.dt else due + late  # no burst of steps after a long pause
                time.sleep(max(0.0, -late))
        except BaseException:
            write(self.damp())
            raise
        return used

    def save(self) -> None:
        """Write the log. Without a transition yet, nothing is written."""
        if self._log:
            self._log.save()

    close = save

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


# -- what a file says --------------------------------------------------------------------------------------------------


def open_session(path: Any) -> Any:
    """Return an ONNX Runtime session on one thread, which wakes up in time more reliably than several."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def vector(values: Any) -> np.ndarray:
    """Return float32 numbers."""
    return np.array(values, np.float32)


def by_name(entries: Any) -> dict[str, Any]:
    """Return entries of the metadata by name."""
    return {entry["name"]: entry for entry in entries}


def terms_of(layout: Mapping[str, Any], groups: Mapping[str, Any], size: int) -> dict[str, tuple[str, int]]:
    """Return the measurements that groups consist of: all terms but the last action [``size``]; a group without a
    layout is one measurement. Raises ``ValueError``: groups have different terms of one name."""
    out: dict[str, tuple[str, int]] = {}
    for group, terms in layout.items():
        whole: Any = {"name": group, "source": group, "width": int(np.prod(groups[group]["shape"][1:]))}
        for term in [whole] if terms is None else terms:
            name, one = term["name"], (term["source"], term["width"])
            if one != ("last_action", size) and out.setdefault(name, one) != one:
                raise ValueError(f"{name}: expected the same in all groups, not {out[name]} and {one}")
    return out


def check_terms(terms: Mapping[str, Any], known: Mapping[str, tuple[str, int]]) -> dict[str, np.ndarray]:
    """Return measurements as float32. Raises ``ValueError``: a name or a width is wrong."""
    if wrong := sorted(terms.keys() ^ known.keys()):
        what = "missing" if wrong[0] in known else "unknown"
        raise ValueError(f"{wrong[0]} is {what}: expected the terms {', '.join(known)}")
    out = {k: np.asarray(x, np.float32) for k, x in terms.items()}
    for k, x in out.items():
        if x.size != known[k][1]:
            raise ValueError(f"{k} has {x.size} numbers: expected {known[k][1]}")
    return out


def check_limits(limits: Limits, of: Controller) -> Limits:
    """Return ``limits``. Raises ``ValueError``: a number is out of range, or the export lacks what a limit needs."""
    if limits.rate is not None:
        rate = vector(limits.rate)
        if of.dt is None or rate.shape not in ((), of.default.shape) or not (rate > 0).all():
            raise ValueError(f"rate={limits.rate}: expected rad/s above 0, for all or each of {of.default.size} joints")
    if limits.clip and of.position_limits is None:
        raise ValueError("clip=True: expected an export with the joints' limits")
    if not 0 < limits.hold_after <= limits.damp_after:
        raise ValueError(f"hold_after={limits.hold_after}: expected seconds above 0, up to {limits.damp_after}")
    return limits


# -- the log -----------------------------------------------------------------------------------------------------------


class Log:
    """Transitions, written as a safetensors file of the layout that a replay reads (``docs/replay.md``)."""

    def __init__(self, path: str, unit: Callable[[np.ndarray], np.ndarray]):
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise ValueError(f"log={path}: expected a file in a folder that exists")
        self.path, self._unit = path, unit
        self._last: dict[str, Any] | None = None
        self._rows: list[dict[str, Any]] = []

    def add(self, obs: Mapping[str, np.ndarray], action: np.ndarray, reward: float, shown: tuple[float, Any]) -> None:
        """Log an observation, which ends the step before, and the action that it led to."""
        self._close(obs, reward, False, False)
        facts = {"action": self._unit(action), "time": np.float64(shown[0]), "target": shown[1]}
        self._last = {**{"obs." + k: x for k, x in obs.items()}, **facts}

    def end(self, obs: Mapping[str, np.ndarray], reward: float, terminated: bool) -> None:
        """Log an episode's final observation."""
        self._close(obs, reward, terminated, not terminated)
        self._last = None

    def cut(self) -> None:
        """Leave the last step out: what followed it is not known."""
        self._last = None

    def _close(self, obs: Mapping[str, np.ndarray], reward: float, terminated: bool, truncated: bool) -> None:
        if self._last is not None:
            flags = {"terminated": np.bool_(terminated), "truncated": np.bool_(truncated)}
            after = {"next_obs." + k: x for k, x in obs.items()}
            self._rows.append({**self._last, **after, **flags, "reward": np.float32(reward)})

    def save(self) -> None:
        """Write all transitions so far, whole or not at all."""
        if not self._rows:
            return
        kinds, entries, parts, start = {"f4": "F32", "f8": "F64", "b1": "BOOL", "u1": "U8", "i8": "I64"}, {}, [], 0
        columns = {k: np.stack([row[k] for row in self._rows]) for k in self._rows[0]}
        for k, x in sorted(columns.items(), key=lambda item: -item[1].itemsize):
            kind = kinds[x.dtype.str[1:]]
            entries[k] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [start, start + x.nbytes]}
            start += x.nbytes
            parts.append(np.ascontiguousarray(x).tobytes())
        head = json.dumps(entries).encode()
        head += b" " * (-len(head) % 8)
        with open(self.path + ".part", "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head + b"".join(parts))
        os.replace(self.path + ".part", self.path)
