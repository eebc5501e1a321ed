"""The robot's record: what adapters read from managers, what our own tasks say, where it travels, what refuses it."""

import copy
import dataclasses
import json
import sys
import types

import fake_isaaclab
import pytest
import torch
from fake_isaaclab import Config, FakeLabEnv, FakeMjlabEnv, JointEffortAction, JointPositionAction, last_action
from mujoco_runs import build, needs, random_actions, task

from pql.cli.doctor_robot import robot_table
from pql.cli.main import main
from pql.contract.conformance import protocol_fault
from pql.contract.robot import robot_fault
from pql.contract.spec_json import spec_from_dict, spec_to_dict
from pql.contract.symmetry import of_robot
from pql.envs.adapters.isaaclab import IsaacLabVec
from pql.envs.adapters.mjlab import MjlabVec
from pql.envs.adapters.robot import with_symmetry
from pql.envs.mujoco import TASKS
from pql.errors import ConfigError, PqlWarning
from pql.remote import protocol
from pql.remote.process.far_build import describe_simulator
from pql.remote.process.near import read_spec
from pql.run.export.writer import mjlab_entries
from pql.run.store.manifest import check_spec_dict

CPU = torch.device("cpu")
LIMITS = [[-1.0, 2.0], [-3.0, 0.0], [-0.5, 0.5]]  # of the joints a, b, c
ORDER, SCALE, POSE = [2, 0, 1], [[0.25, 0.5, 1.0]] * 4, [[0.125, -0.5, -2.0]] * 4  # of the actions


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(fake_isaaclab, "ALIVE", [])
    monkeypatch.setattr(fake_isaaclab, "LAUNCHED", [True])


def managed(mjlab, kind=JointPositionAction, frames=1, robot=None):
    """An environment with managers, whose group of two numbers has two terms (the first with a history)."""
    inner = (FakeMjlabEnv if mjlab else FakeLabEnv)(Config(auto_reset=not mjlab))
    term = kind(robot or fake_isaaclab.robot(LIMITS), mjlab, ORDER, torch.tensor(SCALE), torch.tensor(POSE))
    first = ("last", last_action, torch.tensor([0.5]), (-3, 4), frames, 1)
    observed = {inner.names[0]: [first, ("clock", lambda env: None, None, None, 0, 1)]}
    return fake_isaaclab.add_managers(inner, {"legs": term}, observed)


def record(runtime):
    """The record of :func:`managed`."""
    terms = [
        {"name": "last", "source": "last_action", "width": 1, "scale": [0.5], "clip": [-3, 4], "history": 1},
        {"name": "clock", "source": "<lambda>", "width": 1, "scale": 1.0, "clip": None, "history": 0},
    ]
    return {
        "runtime": runtime,
        "dt": 1.0,
        "terms": {"policy": [{**term, "flatten": True} for term in terms]},
        "commands": ["twist"],
        "joints": ["c", "a", "b"],
        "default": POSE[0],
        "scale": SCALE[0],
        "limits": [LIMITS[i] for i in ORDER],
        "all_joints": ["a", "b", "c"],
        "all_default": [0.25, -0.5, 0.0],
        "kp": [30.0, 10.0, 20.0],
        "kd": [3.0, 1.0, 2.0],
        "effort": [7.0, 5.0, 6.0],
    }


@pytest.mark.parametrize(("make", "runtime"), [(IsaacLabVec, "isaaclab"), (MjlabVec, "mjlab")])
def test_adapters_read_the_record_from_the_managers(make, runtime):
    env = make(managed(runtime == "mjlab"), "Fake")
    assert env.spec.info["robot"] == record(runtime)
    assert protocol_fault(env) == ""
    fake_isaaclab.ALIVE.clear()
    every = managed(runtime == "mjlab")
    term = every.action_manager.get_term("legs")  # a term of all joints in their order has a slice
    for name, value in (("ids", slice(None)), ("names", ["a", "b", "c"])):
        setattr(term, ("_target_" if runtime == "mjlab" else "_joint_") + name, value)
    known = make(every, "Fake").spec.info["robot"]
    assert (known["joints"], known["limits"], known["kp"]) == (["a", "b", "c"], LIMITS, [10.0, 20.0, 30.0])
    fake_isaaclab.ALIVE.clear()
    clipped = managed(runtime == "mjlab")
    clipped.action_manager.get_term("legs")._clip = torch.tensor([[[-1.0, 1.0], [-9.0, 2.0], [0.0, 0.5]]] * 4)
    ends = {"target_clip": [[-1.0, 1.0], [-9.0, 2.0], [0.0, 0.5]]}
    assert make(clipped, "Fake").spec.info["robot"] == record(runtime) | ends
    fake_isaaclab.ALIVE.clear()
    torques = make(managed(runtime == "mjlab", JointEffortAction), "Fake").spec.info["robot"]
    assert torques == {k: record(runtime)[k] for k in ("runtime", "dt", "terms", "commands")}


def test_without_managers_there_is_no_record_and_unknown_ones_are_told():
    assert "robot" not in IsaacLabVec(FakeLabEnv(Config()), "Fake").spec.info
    fake_isaaclab.ALIVE.clear()
    inner = managed(False)
    del inner.observation_manager._group_obs_term_cfgs
    with pytest.warns(
        PqlWarning, match=r"this version of isaaclab .* exports lack the robot's record \(AttributeError"
    ):
        assert "robot" not in IsaacLabVec(inner, "Fake").spec.info


def test_arrays_of_warp_are_read_as_tensors(monkeypatch):
    """Isaac Lab 3: the articulation's data."""
    monkeypatch.setitem(sys.modules, "warp", types.SimpleNamespace(to_torch=lambda array: array.held))
    inner = managed(False)
    data = inner.action_manager.get_term("legs")._asset.data
    for name, value in vars(data).items():
        setattr(data, name, types.SimpleNamespace(held=value))
    env = IsaacLabVec(inner, "Fake", action_bound="limits")
    assert env.spec.info["robot"] == record("isaaclab")
    assert env.spec.action.high == (2.5, 5.0, 2.0)


def test_mujocos_servos_have_their_gains_in_the_model(monkeypatch):
    """mjlab: position servos by joint; a motor (bias not minus gain) has none."""
    robot = fake_isaaclab.robot(LIMITS)
    robot.actuators = []
    rows = {"pad/a": (9.0, 9.0, 0.9), "robot/b": (20.0, 20.0, 2.0), "robot/a": (10.0, 10.0, 1.0), "robot/c": (1, 0, 0)}
    joints = [types.SimpleNamespace(name=name) for name in rows]
    model = types.SimpleNamespace(
        nu=4,
        joint=joints.__getitem__,
        actuator_trnid=torch.arange(4)[:, None].repeat(1, 2).numpy(),
        actuator_trntype=torch.zeros(4).numpy(),
        actuator_gainprm=torch.tensor([[kp] for kp, _, _ in rows.values()]).numpy(),
        actuator_biasprm=torch.tensor([[0, -bias, -kd] for _, bias, kd in rows.values()]).numpy(),
        actuator_forcelimited=torch.tensor([True, True, False, True]).numpy(),
        actuator_forcerange=torch.tensor([[-5.0, 5.0]] * 4).numpy(),
    )
    inner = managed(True, robot=robot)
    inner.sim = types.SimpleNamespace(mj_model=model)
    inner.scene = types.SimpleNamespace(entities={"pad": object(), "robot": robot}, terrain=None)
    known = MjlabVec(inner, "Fake").spec.info["robot"]
    assert not {"kp", "kd", "effort"} & known.keys()  # c has none: not one of a list is made up
    rows["robot/c"] = (30.0, 30.0, 3.0)
    model.actuator_gainprm[3], model.actuator_biasprm[3] = 30.0, [0, -30.0, -3.0]
    fake_isaaclab.ALIVE.clear()
    known = MjlabVec(inner, "Fake").spec.info["robot"]
    assert (known["kp"], known["kd"]) == ([30.0, 10.0, 20.0], pytest.approx([3.0, 1.0, 2.0]))
    assert "effort" not in known  # a is not limited


@pytest.mark.parametrize("name", [task("go1_velocity"), task("g1_velocity"), task("anymal")])
@pytest.mark.parametrize("scale", [None, "limits"])
def test_our_velocity_tasks_know_their_robot(name, scale):
    """Targets and observations by the record alone are those of the simulation."""
    env = build(name, 3, action_scale=scale)
    robot, model = env.spec.info["robot"], env.model
    assert robot == TASKS[name].describe(1, action_scale=scale).info["robot"]
    assert protocol_fault(env) == ""
    joints = [model.joint(joint) for joint in robot["joints"]]
    limits = [end for pair in robot["limits"] for end in pair]
    assert limits == pytest.approx([end for joint in joints for end in joint.range])
    acts = [model.actuator(joint) for joint in robot["joints"]]
    assert robot["kp"] == pytest.approx([act.gainprm[0] for act in acts])
    assert robot["kd"] == pytest.approx([-act.biasprm[2] for act in acts])
    assert robot["effort"] == pytest.approx([act.forcerange[1] for act in acts])
    env.reset(0)
    pose, reach = torch.tensor(robot["default"]), torch.tensor(robot["scale"])
    for action in random_actions(env, 5):
        obs = env.step(action).obs["policy"]
        torch.testing.assert_close(env.engine.fields["ctrl"].float(), pose + reach * action)
        q = env.engine.fields["qpos"][:, [joint.qposadr[0] for joint in joints]].float()
        parts = dict(zip([t["name"] for t in robot["terms"]["policy"]], obs.split(widths(robot), 1), strict=True))
        torch.testing.assert_close(parts["joint_pos"], (q - pose).clamp(-5, 5), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts["actions"], action, atol=1e-5, rtol=1e-5)
    spans = [end for term in robot["terms"]["policy"] for end in numbers(term)]
    assert spans == pytest.approx([5.0] * env.spec.obs["policy"].shape[0])


def widths(robot):
    return [term["width"] for term in robot["terms"]["policy"]]


def numbers(term):
    """The largest observation of each of a term's numbers: clip times scale."""
    return (torch.tensor(term["clip"][1]) * torch.tensor(term["scale"])).expand(term["width"]).tolist()


def test_the_record_travels_to_other_processes_checkpoints_and_exports():
    env = MjlabVec(managed(True), "Fake")
    facts = json.loads(json.dumps(describe_simulator(env.spec)))
    assert read_spec(facts, CPU).info == env.spec.info
    assert protocol.check_facts(facts)["info"] == env.spec.info
    saved = json.loads(json.dumps(spec_to_dict(env.spec)))
    check_spec_dict(saved)
    assert spec_from_dict(saved).info == {"robot": record("mjlab")}
    facts["info"]["robot"]["kp"] = [1.0]
    with pytest.raises(protocol.ProtocolError, match=r"^specification: robot\.kp is not 3 numbers$"):
        protocol.check_facts(facts)
    saved["robot"]["dt"] = 0
    with pytest.raises(ValueError, match=r"^spec\.robot\.runtime is no text, or robot\.dt no time$"):
        check_spec_dict(saved)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("gains", [1.0], "robot.gains is unknown"),
        ("joints", ["a", "b"], "robot.joints has 2 names for 3 actions"),
        ("joints", "abc", "robot.joints is not a list of names"),
        ("default", None, "robot.default is not 3 numbers"),
        ("default", [0.0, float("inf"), 0.0], "robot.default is not finite"),
        ("joints", ["a", "b", "a"], "robot.joints has a name twice, or robot.scale a zero"),
        ("scale", [1.0, 0.0, 1.0], "robot.joints has a name twice, or robot.scale a zero"),
        ("limits", [[0.0, 1.0]] * 2, "robot.limits is not 3 pairs"),
        ("all_default", [0.0], "robot.all_default is not 3 numbers"),
        ("dt", 0.0, "robot.runtime is no text, or robot.dt no time"),
        ("terms", [], "robot.terms is not a mapping"),
        ("terms.critic", [], "robot.terms.critic is not a list of terms of an observation group"),
        ("terms.policy.0.width", 2, "robot.terms.policy.last has a wrong scale, clip or flatten"),
        ("terms.policy.1.width", 2, "robot.terms.policy has 3 numbers, the group 2"),
        ("terms.policy.1.clip", [1.0], "robot.terms.policy.clock has a wrong scale, clip or flatten"),
        ("terms.policy.1.history", -1, "robot.terms.policy has a term without name, source, width and history"),
    ],
)
def test_wrong_records_are_named(path, value, fault):
    robot = copy.deepcopy(record("mjlab"))
    at, (*above, last) = robot, path.split(".")
    for key in above:
        at = at[int(key) if key.isdigit() else key]
    at[last] = value
    if value is None:
        robot["default"] = [1.0, float("nan"), 0.0]
    assert robot_fault(robot, 3, {"policy": (2,)}) == fault
    assert robot_fault(record("mjlab"), 3, {"policy": (2,)}) == ""


def test_mjlabs_entries_of_an_export_have_full_precision():
    robot = record("mjlab")
    robot["scale"] = [1 / 3, 0.5, 1.0]
    about = {"spec": {"robot": robot}, "checkpoint": "run/checkpoints/last"}
    assert mjlab_entries(about) == {
        "run_path": "run/checkpoints/last",
        "joint_names": "a,b,c",
        "joint_stiffness": "10.0,20.0,30.0",
        "joint_damping": "1.0,2.0,3.0",
        "default_joint_pos": "0.25,-0.5,0.0",
        "command_names": "twist",
        "observation_names": "last,clock",
        "observation_terms_scale": "0.5,1.0",
        "observation_terms_clip": "-3.0;4.0,-inf;inf",
        "observation_terms_history_length": "1.0,0.0",
        "observation_terms_flatten_history_dim": "1.0,1.0",
        "action_scale": "0.3333333333333333,0.5,1.0",
    }
    assert mjlab_entries({**about, "spec": {"robot": record("isaaclab")}}) == mjlab_entries({"spec": {}}) == {}


def test_doctor_shows_each_joints_range_in_actions():
    shown = robot_table(IsaacLabVec(managed(False), "Fake").spec).splitlines()
    assert [line.split() for line in shown[1:4]] == [
        ["c", "0.12", "-0.50", "..", "0.50", "-2.50", "..", "1.50", "-1.00", "..", "1.00", "2.50"],
        ["a", "-0.50", "-1.00", "..", "2.00", "-1.00", "..", "5.00", "-1.00", "..", "1.00", "5.00"],
        ["b", "-2.00", "-3.00", "..", "0.00", "-1.00", "..", "2.00", "-1.00", "..", "1.00", "2.00"],
    ]
    assert shown[4] == (
        "The bounds leave out positions within the joints' limits. With task.kwargs.action_bound=limits an action of 1 "
        "is the further limit. With limits_asym -1, 0 and 1 are one limit, the pose and the other limit."
    )
    fake_isaaclab.ALIVE.clear()
    for bound in ("limits", "limits_asym", 5.0):
        assert len(robot_table(IsaacLabVec(managed(False), "Fake", bound).spec).splitlines()) == 4  # no advice
        fake_isaaclab.ALIVE.clear()
    assert robot_table(IsaacLabVec(FakeLabEnv(Config()), "Fake").spec) == ""


@needs("go1")
def test_the_doctor_prints_the_joints(capsys):
    assert main(["doctor", "--env", "go1_velocity", "--num-envs", "2", "--steps", "3"]) == 0
    *above, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in above[-13:]] == ["joint", *TASKS["go1_velocity"].task.joints]
    assert above[-12].split()[1:] == [
        "0.10",
        "-0.86",
        "..",
        "0.86",
        "-1.29",
        "..",
        "1.02",
        "-1.00",
        "..",
        "1.00",
        "1.29",
    ]
    assert last == (
        "The bounds leave out positions within the joints' limits. With task.kwargs.action_scale=limits an action of 1 "
        "is the further limit."
    )


def test_a_model_that_is_not_installed_leaves_the_record_out(monkeypatch):
    def missing(robot):
        raise ConfigError("task", robot, "nothing")

    monkeypatch.setattr("pql.envs.mujoco.unitree.model_file", missing)
    assert "robot" not in TASKS["go1_velocity"].describe(1).info


ABC = {  # of joints a, b and c: a and c are a pair, b changes its sign
    "joints": ["c", "a", "b"],
    "all_joints": ["a", "b", "c"],
    "terms": {
        "policy": [
            {"name": "joint_pos", "source": "joint_pos_rel", "width": 3, "history": 2, "flatten": True},
            {"name": "twist", "source": "generated_commands", "width": 3, "history": 0, "flatten": True},
            {"name": "actions", "source": "last_action", "width": 3, "history": 0, "flatten": True},
        ],
        "critic": [{"name": "feet", "source": "contact", "width": 2, "history": 0, "flatten": True}],
    },
}


def test_the_symmetry_of_a_record_follows_its_terms():
    sides = {"sides": {"a": "c"}, "odd": ["b"]}
    with pytest.warns(PqlWarning, match="group 'critic' has no symmetry without mirror.terms for feet"):
        found = of_robot(ABC, **sides)
    assert found == {
        "action": ((1, 0, 2), (1, 1, -1)),
        "policy": (
            (2, 1, 0, 5, 4, 3, 6, 7, 8, 10, 9, 11),
            (1, -1, 1, 1, -1, 1, 1, -1, -1, 1, 1, -1),
        ),
    }
    assert of_robot(ABC, **sides, terms={"feet": [[1, 0], [1, 1]]})["critic"] == ((1, 0), (1, 1))
    assert of_robot(ABC, **sides, terms={"feet": "same"})["critic"] == ((0, 1), (1, 1))
    for terms, message in (
        ({"feet": "polr"}, "mirror.terms.feet=polr: expected polar, axial, .* .did you mean polar"),
        ({"feet": "polar"}, "symmetry of feet"),
        ({"fet": "same"}, "mirror.terms=fet: expected one of .* .did you mean feet"),
    ):
        with pytest.raises(ConfigError, match=message):
            of_robot(ABC, **sides, terms=terms)


@pytest.mark.parametrize("make", [IsaacLabVec, MjlabVec])
def test_adapters_declare_the_symmetry_they_are_told(make):
    env = make(managed(make is MjlabVec), "Fake")
    told = with_symmetry(env, {"sides": {"a": "c"}, "odd": ["b"], "terms": {"last": "same", "clock": "same"}})
    assert told.spec.info["symmetry"] == {"action": ((1, 0, 2), (1, 1, -1)), "policy": ((0, 1), (1, 1))}
    assert with_symmetry(env, None) is env
    with pytest.raises(ConfigError, match="mirror=side: expected keywords sides, odd, terms"):
        with_symmetry(env, {"side": {}})
    env.spec = dataclasses.replace(env.spec, info={})
    with pytest.raises(ConfigError, match="for a task of a robot with managers"):
        with_symmetry(env, {"sides": {}})
