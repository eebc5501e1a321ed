"""Values of the linear-quadratic regulator ``LQR`` in closed form: V(x) = -x' P x of a policy u = -gain x, in float64.

Source: discounted Riccati equation, Bertsekas, Dynamic Programming and Optimal Control, vol. 2, section 4.2.
"""

import torch


def optimal_gain(env, gamma):
    """Return K of the optimal policy u = -K x, [2, 4], by iterating the Riccati equation to its fixed point."""
    A, B, P = env.A, env.B, env.Q
    K = torch.zeros_like(B.T)
    for _ in range(1000):  # A is stable with spectral radius 0.8: converged to rounding long before
        K = torch.linalg.solve(env.R + gamma * B.T @ P @ B, gamma * B.T @ P @ A)
        P = env.Q + gamma * A.T @ P @ (A - B @ K)
    return K


def value_matrix(env, gamma, gain=None):
    """Solve P = Q + K' R K + gamma (A - B K)' P (A - B K), linear in P; K is the optimal gain by default."""
    K = optimal_gain(env, gamma) if gain is None else gain.to(env.A)
    closed = gamma**0.5 * (env.A - env.B @ K)
    assert torch.linalg.eigvals(closed).abs().max() < 1, "the value is infinite"
    cost = env.Q + K.T @ env.R @ K
    system = torch.eye(16).to(cost) - torch.kron(closed.T, closed.T)
    return torch.linalg.solve(system, cost.reshape(16)).reshape(4, 4)


def value(env, obs, gamma, gain=None):
    """Return V(x): obs [..., 4] -> [...]."""
    x = obs.to(env.A)
    return -((x @ value_matrix(env, gamma, gain)) * x).sum(-1)


def q_value(env, obs, action, gamma, gain=None):
    """Return Q(x, u), followed by the policy: obs [..., 4], action [..., 2] -> [...]."""
    x, u = obs.to(env.A), action.to(env.A)
    reward = -((x @ env.Q) * x).sum(-1) - ((u @ env.R) * u).sum(-1)
    return reward + gamma * value(env, x @ env.A.T + u @ env.B.T, gamma, gain)
