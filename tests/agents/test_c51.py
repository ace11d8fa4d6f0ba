import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.agents.c51 import project

projected = jax.jit(project)


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([0.0, 1.0, 2.0, 3.0], [0.1, 0.2, 0.3, 0.4]),  # on the support: nothing moves
        ([0.25, 1.0, 2.5, 3.0], [0.075, 0.225, 0.15, 0.55]),  # a return gives most to the closer one of its neighbours
        ([1.5, 1.5, 1.5, 1.5], [0.0, 0.5, 0.5, 0.0]),
        ([2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 1.0, 0.0]),  # a terminal state: all of it on one atom
        ([-5.0, -0.1, 3.1, np.inf], [0.3, 0.0, 0.0, 0.7]),  # clipped at the ends
        ([3.0, 2.0, 1.0, 0.0], [0.4, 0.3, 0.2, 0.1]),  # the order does not matter
    ],
)
def test_projection_by_hand(returns, expected):
    probabilities = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    np.testing.assert_allclose(projected(jnp.array([returns]), probabilities, jnp.arange(4.0))[0], expected, atol=1e-6)


def loop(returns, probabilities, support):
    """Algorithm 1 of Bellemare et al. 2017, in plain Python."""
    result, last = np.zeros(probabilities.shape), len(support) - 1
    spacing = (support[-1] - support[0]) / last
    for m in range(len(returns)):
        for k in range(len(support)):
            b = (min(max(returns[m, k], support[0]), support[-1]) - support[0]) / spacing
            lower = min(int(b), last - 1)
            result[m, lower] += (lower + 1 - b) * probabilities[m, k]
            result[m, lower + 1] += (b - lower) * probabilities[m, k]
    return result


def arguments(low, high, atoms, spread):
    rng = np.random.default_rng(0)
    support = np.linspace(low, high, atoms)
    returns = rng.uniform(low - spread * (high - low), high + spread * (high - low), (8, atoms))
    probabilities = rng.dirichlet(np.full(atoms, 0.5), 8)
    return returns, probabilities, support


@pytest.mark.parametrize(("low", "high", "atoms"), [(-10.0, 10.0, 51), (0.0, 200.0, 51), (-0.3, 0.1, 2)])
@pytest.mark.parametrize("spread", [-0.01, 0.5])
def test_projection_matches_a_double_loop(low, high, atoms, spread):
    returns, probabilities, support = arguments(low, high, atoms, spread)
    result = np.asarray(projected(*map(jnp.float32, (returns, probabilities, support))))
    np.testing.assert_allclose(result, loop(returns, probabilities, support), atol=1e-5)
    np.testing.assert_allclose(result.sum(1), 1.0, rtol=1e-5)
    if spread < 0:  # all returns inside the support
        means = (returns * probabilities).sum(1)
        np.testing.assert_allclose(result @ support, means, atol=1e-5 * (high - low))
    assert result.min() >= 0
