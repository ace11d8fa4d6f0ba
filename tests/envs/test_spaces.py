import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rljax.envs import Box, Discrete, MultiDiscrete

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


def draw(space, n=2000):
    return np.asarray(jit(jax.vmap(space.sample))(jax.random.split(jax.random.key(0), n)))


def test_discrete_draws_are_uniform():
    space = Discrete(5)
    samples = draw(space)
    assert samples.dtype == np.int32
    assert samples.shape == (2000, *space.shape)
    assert scipy.stats.chisquare(np.bincount(samples, minlength=5)).pvalue > 1e-3
    assert space.contains(samples)


def test_discrete_contains():
    space = Discrete(5)
    assert [bool(space.contains(jnp.int32(x))) for x in (-1, 0, 4, 5)] == [False, True, True, False]


def test_multi_discrete_draws_are_uniform():
    space = MultiDiscrete((2, 3, 1))
    samples = draw(space)
    assert samples.dtype == np.int32
    assert samples.shape == (2000, *space.shape)
    counts = np.bincount(np.ravel_multi_index(samples.T, space.nvec), minlength=6)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_multi_discrete_contains():
    space = MultiDiscrete((2, 3, 1))
    points = [(0, 0, 0), (1, 2, 0), (2, 0, 0), (0, 2, 1), (0, -1, 0)]
    assert [bool(space.contains(jnp.array(x))) for x in points] == [True, True, False, False, False]


def test_bounded_box_draws_are_uniform():
    space = Box(np.array([-2.0, 0.0, 5.0]), np.array([3.0, 0.5, 5.0]), (3,))
    samples = draw(space)
    assert samples.dtype == np.float32
    assert scipy.stats.kstest(samples[:, 0], scipy.stats.uniform(-2.0, 5.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(samples[:, 1], scipy.stats.uniform(0.0, 0.5).cdf).pvalue > 1e-3
    np.testing.assert_array_equal(samples[:, 2], 5.0)
    assert space.contains(samples)
    assert not space.contains(samples + 0.6)


@pytest.mark.parametrize("infinite", [np.inf, np.finfo(np.float32).max])
def test_unbounded_box_draws_are_finite(infinite):
    low, high = np.array([-infinite, 0.5, -infinite, -1.0]), np.array([infinite, infinite, -0.5, 1.0])
    space = Box(low, high, (4,))
    samples = draw(space)
    assert np.all(np.isfinite(samples))
    assert space.contains(samples)
    assert scipy.stats.kstest(samples[:, 0], scipy.stats.norm.cdf).pvalue > 1e-3
    assert samples[:, 1].min() == 0.5
    assert samples[:, 1].max() > 2.0
    assert samples[:, 2].max() == -0.5
    assert samples[:, 2].min() < -2.0
    assert np.abs(samples[:, 3]).max() <= 1.0


def test_box_contains():
    space = Box(-1.0, np.inf, (2,))
    points = [(0.0, 1e30), (-1.0, np.inf), (-1.1, 0.0), (np.nan, 0.0)]
    assert [bool(space.contains(jnp.array(x))) for x in points] == [True, True, False, False]


def test_box_bounds_may_be_traced():
    samples = jit(jax.vmap(lambda high: Box(0.0, high, (50,)).sample(jax.random.key(0))))(jnp.array([1.0, 10.0]))
    np.testing.assert_allclose(samples[1], 10 * samples[0], rtol=1e-6)
    assert 0.9 < samples[0].max() < 1.0


def test_box_of_integers():
    space = Box(0, 255, (2, 2), jnp.uint8)
    samples = draw(space)
    assert samples.dtype == np.uint8
    assert samples.shape == (2000, 2, 2)
    assert samples.min() < 10
    assert samples.max() > 245
    assert space.size == 4


@pytest.mark.parametrize("make", [lambda: Discrete(0), lambda: MultiDiscrete(()), lambda: MultiDiscrete((3, 0))])
def test_empty_spaces_raise(make):
    with pytest.raises(ValueError, match="Discrete"):
        make()
