"""Bandits: rewards and regret against what is known by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.envs import check
from rljax.envs.bandits import BernoulliBandit, LinearBandit, Routing

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


def test_rewards_and_regret_of_the_plain_ones():
    env = LinearBandit(actions=3, context_size=2, noise=0.0, task=4)
    check(env)
    state, timestep = env.reset(jax.random.key(0))
    means = np.asarray(env.weights @ timestep.observation)
    for arm in range(3):
        _, after = env.step(jax.random.key(1), state, jnp.int32(arm))
        assert float(after.reward) == pytest.approx(means[arm], abs=1e-6)
        assert float(after.info["regret"]) == pytest.approx(means.max() - means[arm], abs=1e-6)
        assert after.terminated
    assert (LinearBandit(task=1).weights != LinearBandit(task=2).weights).any()
    coins = BernoulliBandit(actions=3, low=0.2, high=0.8)
    check(coins)
    keys = jax.random.split(jax.random.key(0), 4000)
    paid = jax.jit(jax.vmap(lambda key: coins.step(key, jnp.int32(0), jnp.int32(1))[1]))(keys)
    assert float(paid.reward.mean()) == pytest.approx(0.5, abs=0.04) and set(np.unique(paid.reward)) == {0.0, 1.0}
    np.testing.assert_allclose(paid.info["regret"], 0.3, atol=1e-6)


def test_routing_by_hand():
    env = Routing(tools=2, topics=2, sharpness=2.0, specialty=0.5, cost_weight=0.1, noise=0.0)
    check(env)
    # Levels 0.5 and 1; a request of topic 1 with difficulty 1 is the second tool's own.
    sigmoid = 1 / (1 + np.exp(-2.0 * np.array([0.5 - 1.0, 1.0 + 0.5 - 1.0])))
    expected = sigmoid - 0.1 * np.array([0.5, 1.0])
    np.testing.assert_allclose(env.expected(jnp.float32(1.0), jnp.int32(1)), expected, rtol=1e-5)
    state = (jnp.zeros((2, 2)), jnp.float32(1.0), jnp.int32(1), jnp.int32(0))
    after_state, after = env.step(jax.random.key(0), state, jnp.int32(0))
    assert float(after.reward) == pytest.approx(expected[0], rel=1e-5)
    assert float(after.info["regret"]) == pytest.approx(expected[1] - expected[0], rel=1e-4)
    assert not after.done and int(after_state[3]) == 1
    assert after.observation[0] == after_state[1] and int(jnp.argmax(after.observation[1:])) == after_state[2]
    last = (*state[:3], jnp.int32(env.max_steps - 1))
    assert env.step(jax.random.key(0), last, jnp.int32(0))[1].truncated


def test_the_right_tool_depends_on_the_request_and_goes_stale():
    env = rljax.make_env("Routing", drift=0.05)
    grid = [(d, t) for d in np.linspace(0, 1, 11) for t in range(3)]
    best = {int(jnp.argmax(env.expected(jnp.float32(d), jnp.int32(t)))) for d, t in grid}
    assert len(best) >= 3

    def life(key, drift):
        moving = Routing(drift=drift)

        def step(loop, key):
            state, timestep = loop
            action = jnp.argmax(moving.expected(state[1], state[2]))  # right at the start
            state, timestep = moving.step(key, state, action)
            return (state, timestep), (timestep.info["regret"], state[0])

        return jax.lax.scan(step, moving.reset(key), jax.random.split(key, 900))[1]

    regret, walk = quick_jit(jax.vmap(life, (0, None)))(jax.random.split(jax.random.key(0), 20), 0.05)
    assert regret[:, 0].max() < 1e-6
    assert regret[:, :50].mean() < 0.02 < 0.05 < regret[:, -50:].mean()
    assert float(walk[:, -1].std()) == pytest.approx(0.05 * np.sqrt(900), rel=0.2)
    still = quick_jit(jax.vmap(life, (0, None)))(jax.random.split(jax.random.key(0), 2), 0.0)[0]
    assert float(still.max()) < 1e-6


@pytest.mark.parametrize("wrong", [dict(tools=1), dict(topics=0), dict(max_steps=0)])
def test_sizes_that_make_no_task_are_refused(wrong):
    with pytest.raises(ValueError, match=f"env_params.{next(iter(wrong))} must be"):
        rljax.make_env("Routing", **wrong)
