"""``pql doctor --env``: the range of each joint of a robot in units of the simulator's actions."""

from pql.cli.tables import table
from pql.contract.env import Box, EnvSpec

HEAD = ["joint", "pose, rad", "limits, rad", "as actions", "bounds now", "further limit"]
ADVICE = "The bounds leave out positions within the joints' limits. With {}=limits an action of 1 is the further limit."
ASYMMETRIC = " With limits_asym -1, 0 and 1 are one limit, the pose and the other limit."
SLACK = 0.01  # of bounds, in units of actions


def robot_table(spec: EnvSpec) -> str:
    """Return a table of the joints that position targets move, and which bounds to choose; "" for other actions.

    Columns: pose and limits in rad; limits and bounds as actions of the simulator, ``target = pose + scale * action``;
    the bound that ``limits`` sets."""
    robot = spec.info.get("robot", {})
    if "limits" not in robot or not isinstance(spec.action, Box):
        return ""
    rows, reached = [HEAD], True
    named = (robot[k] for k in ("joints", "default", "scale", "limits"))
    for name, pose, scale, ends, low, high in zip(*named, *spec.action.bounds, strict=True):
        down, up = sorted((end - pose) / scale for end in ends)
        most = max(abs(down), abs(up))
        reached = reached and low <= down + SLACK and high >= up - SLACK
        span = [f"{a:.2f} .. {b:.2f}" for a, b in (ends, (down, up), (low, high))]
        rows.append([name, f"{pose:.2f}", *span, f"{most:.2f}"])
    own = robot["runtime"] == "pql"
    setting = f"task.kwargs.action_{'scale' if own else 'bound'}"
    advice = "" if reached else "\n" + ADVICE.format(setting) + ("" if own else ASYMMETRIC)
    return table(rows, right=range(1, len(HEAD))) + advice
