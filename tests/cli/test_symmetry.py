"""``pql doctor --symmetry``: right maps pass, and every wrong sign is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pql.cli.doctor_symmetry import SAME, UNSEEN, WRONG, check_symmetry, contrasts, judged, labels, summary
from pql.cli.main import main
from pql.contract.env import make_env
from pql.contract.symmetry import POLAR, side_by_side
from pql.errors import ConfigError

TURNED = ((0, 1, 2), (-1, -1, -1))


@pytest.fixture(scope="module")
def swimmer():
    pytest.importorskip("mujoco")
    env = make_env("swimmer", 32)
    yield env
    env.close()


def declaring(env, group=None, element=0, states=True, **maps):
    """``env`` with another symmetry: with a wrong sign of an element of ``group``. ``states``: can be reflected."""
    symmetry = {**env.spec.info["symmetry"], **maps}
    if group is not None:
        index, sign = symmetry[group]
        symmetry[group] = index, tuple(-x if i in (element, index[element]) else x for i, x in enumerate(sign))
    spec = replace(env.spec, info={**env.spec.info, "symmetry": symmetry})
    names = ("reset", "step", *(("state_dict", "load_state_dict", "reflected") if states else ()))
    return SimpleNamespace(spec=spec, **{name: getattr(env, name) for name in names})


@pytest.mark.parametrize("states", [True, False])
def test_the_right_map_passes_and_each_wrong_sign_is_found(swimmer, states):
    text, wrong = check_symmetry(declaring(swimmer, states=states), 100)
    assert wrong == []
    assert text.startswith("swimmer: steps of 256 reflected" if states else "swimmer: statistics of 100 random steps")
    assert next(line for line in text.splitlines() if line.startswith("policy")).endswith("equal")
    for element in (0, 2, 3, 7) if states else (1, 3, 6):
        text, wrong = check_symmetry(declaring(swimmer, "policy", element, states), 100)
        assert wrong == ["policy 0 to 7"]
        assert f"policy {element} " in next(line for line in text.splitlines() if line.endswith(WRONG))
    exchanged = declaring(swimmer, states=states, action=((1, 0), (-1, -1)))
    assert check_symmetry(exchanged, 100)[1][0] == ("policy 0 to 7" if states else "action 0 to 1")


def test_a_robots_rows_have_its_names():
    try:
        env = make_env("go1_velocity", 32)
    except ConfigError as error:
        pytest.skip(str(error))
    joints = env.spec.info["robot"]["joints"]
    at = 12 + joints.index("FL_hip_joint")
    assert labels(env.spec, env.spec.info["symmetry"])[at] == ("policy", "joint_pos", "joint_pos FL_hip_joint")
    assert check_symmetry(env, 0)[1] == []
    text, wrong = check_symmetry(declaring(env, "policy", at), 0)
    env.close()
    assert wrong == ["policy joint_pos"]
    line = next(line for line in text.splitlines() if line.endswith(WRONG))
    assert "FL_hip_joint" in line or "FR_hip_joint" in line


def test_steps_that_draw_random_numbers_are_compared_by_statistics():
    pytest.importorskip("mujoco")
    env = make_env("ant", 4, contact_forces=False, randomize={"obs_noise": 0.01})
    assert summary(env) == "declared for policy, action; not checked: pql doctor --symmetry does"
    assert "statistics of 20 random steps of 4" in check_symmetry(env, 20)[0]
    env.close()


def test_contrasts_by_hand():
    """Two elements that are exchanged, and the reward: of every environment the products are known."""
    rows = torch.tensor([[[2.0, 0.0, 1.0], [4.0, 0.0, 1.0]], [[-2.0, 0.0, -1.0], [-4.0, 0.0, -1.0]]]).double()
    size, score = contrasts(rows, ((1, 0, 2), (1.0, 1.0, 1.0)), 2)
    # Means are 0; the variance of the pair is (10 + 0) / 2 = 5, of the reward 1.
    product, with_reward = (4 / 5 + 16 / 5) / 2, (2 + 4) / 2 / 5**0.5
    assert size[0, 0, 0] == size[1, 0, 0] == pytest.approx(product)
    assert size[0, 0, 2] == size[1, 0, 2] == pytest.approx(with_reward)
    for pair in ((2, 2), (0, 3)):  # x x r has another sign in the second step
        assert size[0][pair] == pytest.approx(0, abs=1e-12)
    assert size[1, 2, 2] == pytest.approx(2)
    t = product / ((16 / 5 - 4 / 5) / 2)  # of two environments: the error is half of their difference
    assert score[0, 0, 0] == pytest.approx(t * 0.75 / (1 + t**2 / 2) ** 0.5)


def test_who_disagrees_with_most_is_blamed_and_noise_is_not_tested():
    """x and y follow from u, z is noise; the declared sign of y is wrong."""
    gen = torch.Generator().manual_seed(0)
    u, x, y, z, reward = torch.randn(5, 40, 32, generator=gen).double()
    rows = torch.stack((u, u + 0.1 * x, u + 0.1 * y, z, reward, torch.zeros(40, 32)), 2)
    known = [("g", "t", name) for name in ("u", "x", "y", "z")] + [("reward", "", ""), ("ends", "", "")]
    whole = tuple(range(6)), (-1.0, -1.0, 1.0, -1.0, 1.0, 1.0)
    found = judged(*contrasts(rows, whole, 4), whole, known)
    assert [one.verdict for one in found] == [SAME, SAME, WRONG, UNSEEN, SAME, SAME]
    assert found[2].beside in ("u", "x")
    assert found[2].largest > 1.9
    assert found[0].largest < 0.3


def test_the_command(capsys, monkeypatch):
    pytest.importorskip("mujoco")
    assert main(["doctor", "--symmetry", "task=swimmer", "--num-envs", "4"]) == 0
    assert "swimmer: steps of 32 reflected states against the reflected steps" in capsys.readouterr().out
    wrong = {"policy": side_by_side(TURNED, POLAR, ((0, 1), (1, 1))), "action": ((0, 1), (-1, -1))}
    monkeypatch.setattr("pql.envs.mujoco.locomotion.Swimmer.symmetry", lambda: wrong)
    assert main(["doctor", "task=swimmer", "--symmetry", "--num-envs", "4"]) == 1
    assert "swimmer is not as symmetric as it declares: policy 0 to 7" in capsys.readouterr().err
    monkeypatch.setattr("pql.cli.doctor_env.SPEED_SECONDS", 0.01)
    assert main(["doctor", "task=swimmer", "--num-envs", "2", "--steps", "5"]) == 0
    assert "checked: the step of a reflected state is not the reflected step" in capsys.readouterr().out
    assert main(["doctor", "--symmetry", "task=halfcheetah"]) == 2
    assert "--symmetry=halfcheetah: expected a task that declares a symmetry" in capsys.readouterr().err
    assert main(["doctor", "--symmetry"]) == 2
