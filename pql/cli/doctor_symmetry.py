"""``pql doctor --symmetry``: does a task behave as the symmetry says that it declares?

Where environments can be put into reflected states, the step of a reflected state is compared with the reflected step.
Elsewhere statistics under random actions are compared with those of the reflected rows: means, deviations,
correlations, and correlations weighted by the reward are equal up to chance. Environments are independent of each
other, so their deviation gives the standard error.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pql.cli.tables import table
from pql.contract.env import Box, EnvSpec, VecEnv
from pql.contract.optional import Reflectable, supports
from pql.contract.symmetry import SCALAR, Reflection, check_reflection, reflect, side_by_side
from pql.errors import ConfigError
from pql.types import Step

STATES, APART = 8, 12  # how many sets of states are reflected, and random steps between two
HELD = 4  # steps for which statistics hold an action, because longer pushes move more
EQUAL, ALIKE = 1e-3, 0.15  # rms difference, as a share of the deviation
CHANCE, SMALL = 5.5, 0.04  # standard errors and standard deviations (or correlation) from which a difference counts
MISFIT = 0.25  # squared differences, as a share of those with another sign, from which a map is wrong
CHUNK = 10  # elements in a row of the table, without names
HEAD = ["group", "elements", "largest", "rms", "worst", "verdict"]
ADVICE = {  # verdicts, the better first
    "not tested": "constant, or random actions show nothing that depends on its sign; more environments or steps "
    "(--num-envs, --steps) may.",
    "equal": "",
    "differs a little": "left and right of the model differ a little; a wrong sign differs more.",
    "differs in part": "from few other elements, as of a sensor beside the middle; with the other sign it would differ "
    "from more.",
    "DIFFERS": "an index or a sign of these elements, of those named with them, or of the actions is wrong; or the "
    "task is not symmetric, for example its commands or first states.",
}
UNSEEN, SAME, CLOSE, PART, WRONG = VERDICTS = tuple(ADVICE)
Names = list[tuple[str, str, str]]
"""Of each element: group, row of the table, name."""


class Finding(NamedTuple):
    """Of one element: the largest and the rms difference, the verdict, and the element with which it shows."""

    largest: float
    rms: float
    verdict: str
    beside: str = ""


Report = tuple[str, list[Finding | None]]
"""How a task was tested, and a finding for each element; None: not compared."""


def check_symmetry(env: VecEnv, steps: int, seed: int = 0) -> tuple[str, list[str]]:
    """Return a report on the symmetry that ``env`` declares, and the rows that differ. Raises ``ConfigError``: it
    declares none, or a wrong one."""
    maps = declared(env.spec)
    title, found = stepwise(env, maps, seed) or statistical(env, maps, steps, seed)
    rows: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for (group, row, element), one in zip(labels(env.spec, maps), found, strict=True):
        if one is not None:
            rows.setdefault((group, row), []).append((element or group, one))
    lines, wrong = [HEAD], []
    for (group, row), each in rows.items():
        name, worst = max(each, key=lambda pair: (VERDICTS.index(pair[1].verdict), pair[1].largest))
        unseen = [element for element, one in each if one.verdict == UNSEEN]
        said = [worst.verdict] if len(unseen) < len(each) else []
        if unseen:
            said.append(f"{UNSEEN}: {', '.join(unseen) if len(unseen) < 4 else f'{len(unseen)} of {len(each)}'}")
        most, rms = max(one.largest for _, one in each), (sum(one.rms**2 for _, one in each) / len(each)) ** 0.5
        place = name + (f" with {worst.beside}" if worst.beside else "")
        lines.append([group, row, f"{most:.2g}", f"{rms:.2g}", place, "; ".join(said)])
        wrong += [f"{group} {row}".strip()] if worst.verdict == WRONG else []
    seen = {one.verdict for one in found if one is not None}
    advice = [f"{verdict}: {text}" for verdict, text in ADVICE.items() if text and verdict in seen]
    return "\n".join([title, "", table(lines, right=(2, 3)), *advice]), wrong


def summary(env: VecEnv) -> str:
    """Return a line on the symmetry that ``env`` declares, and steps it where that can be compared step by step."""
    if "action" not in (env.spec.info.get("symmetry") or {}):
        return "none declared"
    maps = declared(env.spec)
    told = "not checked: pql doctor --symmetry does"
    if (found := stepwise(env, maps, 0)) is not None:
        wrong = any(one is not None and one.verdict == WRONG for one in found[1])
        told = f"checked: the step of a reflected state is {'not ' * wrong}the reflected step"
    return f"declared for {', '.join(maps)}; {told}"


def declared(spec: EnvSpec) -> dict[str, Reflection]:
    """Return the reflections that a task declares of observation groups and ``action``; see :func:`check_symmetry`."""
    given = spec.info.get("symmetry") or {}
    if not isinstance(spec.action, Box) or "action" not in given:
        wanted = "a task that declares a symmetry: EnvSpec.info, or task.kwargs.mirror (docs/guides/robot_kit.md)"
        raise ConfigError("--symmetry", spec.name, wanted)
    shapes = {**{k: part.shape for k, part in spec.obs.items() if k in given}, "action": spec.action.shape}  # it last
    checked = {name: check_reflection(name, given[name], shape[-1]) for name, shape in shapes.items()}
    return {name: side_by_side(*[one] * math.prod(shapes[name][:-1])) for name, one in checked.items()}


def labels(spec: EnvSpec, maps: Mapping[str, Reflection]) -> Names:
    """Return the names of observations, actions, reward and ends."""
    out, robot = Names(), spec.info.get("robot", {})
    for group, (index, _) in maps.items():
        own = [(group, "", name) for name in robot.get("joints", ())] if group == "action" else Names()
        for term in robot.get("terms", {}).get(group, ()):
            joints, width = robot.get("joints" if term["source"] == "last_action" else "all_joints", ()), term["width"]
            names = joints if len(joints) == width else [str(i) for i in range(width)]
            own += [(group, term["name"], f"{term['name']} {name}") for name in [*names] * max(term["history"], 1)]
        if len(own) != len(index):
            spans = [range(i, min(i + CHUNK, len(index))) for i in range(0, len(index), CHUNK)]
            own = [(group, f"{one[0]} to {one[-1]}", f"{group} {i}") for one in spans for i in one]
        out += own
    return [*out, ("reward", "", ""), ("ends", "", "")]


def row_of(step: Step, maps: Mapping[str, Reflection], action: Tensor) -> Tensor:
    """Return the numbers of a step in the order of :func:`labels`, [N, D] float64; NaN where they are not known."""
    parts = [action if name == "action" else step.final_obs[name].flatten(1) for name in maps]
    row = torch.cat([part.double() for part in (*parts, step.reward[:, None], step.terminated[:, None])], 1)
    return row.masked_fill(~((step.valid & step.final_ok)[:, None] & row.isfinite()), torch.nan)


@torch.no_grad()
def stepwise(env: VecEnv, maps: Mapping[str, Reflection], seed: int) -> Report | None:
    """Compare the steps of reflected states with the reflected steps; None: states cannot be reflected, or steps are
    random."""
    if not supports(env, Reflectable):
        return None
    spec, whole, pairs = env.spec, side_by_side(*maps.values(), SCALAR, SCALAR), []
    gen = torch.Generator().manual_seed(seed)
    env.reset(seed)
    for _ in range(STATES):
        *before, action = (spec.action.random(spec.num_envs, gen).to(spec.device) for _ in range(APART + 1))
        for one in before:
            env.step(one)
        state, turned = env.state_dict(), reflect(maps["action"], action)
        if (mirrored := env.reflected(state)) is None:
            return None
        row = row_of(env.step(action), maps, action)
        env.load_state_dict({**state, "generator": env.state_dict()["generator"]})
        other = row_of(env.step(action), maps, action)  # differs where the step draws random numbers
        env.load_state_dict(mirrored)
        reflected = row_of(env.step(turned), maps, turned)
        same = ((row - other).abs() < EQUAL).all(1) & reflected.isfinite().all(1)  # False for NaN
        pairs.append(torch.stack((reflect(whole, row), reflected))[:, same])
        env.load_state_dict(state)
    x, y = torch.cat(pairs, 1)
    if len(x) < STATES * spec.num_envs / 2:
        return None
    numbers = torch.stack(((y - x).abs().amax(0), (y - x).square().mean(0).sqrt(), torch.cat((x, y)).std(0)))
    found = list[Finding | None]()
    for (group, *_), (most, rms, wide) in zip(labels(spec, maps), numbers.T.tolist(), strict=True):
        share = rms / max(wide, 1e-6)
        verdict = SAME if share < EQUAL else CLOSE if share < ALIKE else WRONG
        verdict = UNSEEN if verdict == SAME and wide < 1e-6 else verdict
        found.append(None if group == "action" else Finding(most, rms, verdict))
    return f"{spec.name}: steps of {len(x)} reflected states against the reflected steps", found


@torch.no_grad()
def statistical(env: VecEnv, maps: Mapping[str, Reflection], steps: int, seed: int) -> Report:
    """Compare statistics of ``steps`` random steps with those of their reflections."""
    spec, gen, rows = env.spec, torch.Generator().manual_seed(seed), []
    known, obs, action = labels(spec, maps), env.reset(seed), torch.zeros(0)
    for i in range(steps):
        if i % HELD == 0:
            action = spec.action.random(spec.num_envs, gen).to(spec.device)
        step = env.step(action)
        row, last = row_of(step, maps, action), row_of(step._replace(final_obs=obs), maps, action)
        rows.append(torch.cat((row, (row - last)[:, : -action.shape[1] - 2]), 1).cpu())  # and changes of observations
        obs = step.obs
    whole = side_by_side(*maps.values(), SCALAR, SCALAR, *(one for name, one in maps.items() if name != "action"))
    title = f"{spec.name}: statistics of {steps} random steps of {spec.num_envs} environments against those reflected"
    return title, judged(*contrasts(torch.stack(rows), whole, len(known) - 2), whole, known)


def contrasts(rows: Tensor, whole: Reflection, reward: int) -> tuple[Tensor, Tensor]:
    """Compare statistics of rows with those of their reflections.

    Statistics of D elements are [D, 2 D + 1]: correlations, those weighted by the reward, and means, in deviations.

    Args:
        rows: [T, N, D] float64; NaN: not known. ``reward``: index of the reward among the elements.
        whole: reflection of a row.
    Returns:
        (size, score), [2, D, 2 D + 1] each: of the differences, and of those that there would be if the sign of the
        first element of a pair were the other one; score in standard errors.
    """
    index, sign, count = torch.tensor(whole[0]), torch.tensor(whole[1]).double(), rows.shape[1]
    mean = rows.nanmean((0, 1))
    mean = (mean + sign * mean[index]) / 2
    variance = (rows - mean).square().nanmean((0, 1))
    std = ((variance + variance[index]) / 2).sqrt()
    std = torch.where(std > 1e-6, std, torch.inf)
    signs = sign[:, None] * torch.cat((sign, sign, torch.ones(1)))
    columns = torch.cat((index, index + len(index), torch.tensor([2 * len(index)])))
    power = torch.zeros(2, 2, *signs.shape).double()
    for own in rows.unbind(1):
        unit, level = ((own - mean) / std).nan_to_num(0.0), (own / std).nan_to_num(0.0).mean(0)
        products = torch.cat((unit, unit * unit[:, reward, None]), 1)
        found = torch.cat((unit.T @ products / len(own), level[:, None]), 1)
        turned = signs * found[index][:, columns]
        both = torch.stack((found - turned, found + turned))
        power += torch.stack((both, both.square()))
    size, free = power[0] / count, max(count - 1, 1)
    t = size.abs() / ((power[1] / count - size.square()).clamp(min=0) / free).sqrt().clamp(min=1e-9)
    score = t * (1 - 1 / (4 * free)) / (1 + t.square() / (2 * free)).sqrt()  # Student's t as a normal quantile
    return size.abs(), score


def judged(size: Tensor, score: Tensor, whole: Reflection, known: Names) -> list[Finding | None]:
    """Return a finding for each of the L elements of ``known`` from :func:`contrasts` [2, D, 2 D + 1] of all D. Of two
    elements that disagree the one is blamed that disagrees with more."""
    total, count = size.shape[1], len(known)
    owner = torch.cat((torch.arange(count), torch.arange(total - count)))  # changes count for their element
    fold = (owner == torch.arange(count)[:, None]).double()

    def folded(values: Tensor) -> Tensor:  # [D, 2 D + 1] -> [L, L + 1]; the last: of means
        pairs = fold @ (values[:, :total] + values[:, total:-1]) @ fold.T
        return torch.cat((pairs + pairs.T, fold @ values[:, -1:]), 1)

    counts = (score > CHANCE) & (size > SMALL)
    against, otherwise = folded(score[0].square() * counts[0]), folded(counts[1].double())
    as_declared, turned = (folded(one.square() * counts.any(0)) for one in size)
    for i, j in enumerate(whole[0][:count]):
        otherwise[i, [i, j]] = 0  # the sign of both would be another
    blamed: dict[int, tuple[str, str]] = {}
    while bool(against.any()):
        i = int(against.sum(1).argmax())
        j = int(against[i].argmax())
        verdict = WRONG if as_declared[i].sum() > MISFIT * turned[i].sum() else PART
        blamed[i] = verdict, (known[j][2] or known[j][0]) if j < count else "its mean"
        for one in (against, as_declared, turned):
            one[i], one[:, i] = 0, 0
    fine, out = torch.tensor([int(i) not in blamed for i in owner]), list[Finding | None]()
    fine = torch.cat((fine, fine, torch.tensor([True])))
    for i in range(count):
        own, errors = (one[0, owner == i][:, slice(None) if i in blamed else fine].flatten() for one in (size, score))
        told = blamed.get(i, (SAME if i >= count - 2 or bool(otherwise[i].any()) else UNSEEN, ""))
        out.append(Finding(float(own[errors.argmax()]), float(own.square().mean().sqrt()), *told))
    return out
