"""Parameters as one flat vector, or as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rljax
from rljax.agents import a2c, base, dqn, pqn, sac, td3

OFF_POLICY = dict(hidden=(16,), num_envs=2, num_steps=4, batch_size=8, buffer_size=64, learning_starts=8)
AGENTS = {
    "a2c": (a2c, dict(hidden=(16,), num_envs=4), "CartPole-v1"),
    "pqn": (pqn, dict(hidden=(16,), num_envs=4, num_steps=8, anneal_steps=1000.0), "CartPole-v1"),
    "dqn": (dqn, dict(**OFF_POLICY, anneal_steps=1000.0, duelling=True), "CartPole-v1"),
    "sac": (sac, OFF_POLICY, "Pendulum-v1"),
    "td3": (td3, OFF_POLICY, "Pendulum-v1"),
}


def test_small_networks_are_packed_into_a_vector_and_large_ones_are_not():
    small = {"kernel": jnp.ones((255, 256)), "bias": jnp.zeros(256) - 1}
    vector, unpack = base.packed({"kernel": small["kernel"], "bias": small["bias"][:255]})
    assert vector.shape == (base.LARGE - 1,)
    assert jax.tree.map(jnp.shape, unpack(vector)) == {"kernel": (255, 256), "bias": (255,)}
    same, unpack = base.packed(small)
    assert same is small and unpack(same) is small


@pytest.mark.parametrize("name", AGENTS)
def test_learning_is_the_same_packed_or_not(name, monkeypatch):
    module, options, env = AGENTS[name]
    after = []
    for large in (0, 10**9):
        monkeypatch.setattr(base, "LARGE", large)
        agent = module.make(module.Config(**options), rljax.make_env(env))
        state = agent.init(jax.random.key(0))
        before, step = state.params, jax.jit(agent.step)
        for _ in range(3):
            state, _ = step(state)
        after.append(state.params)
        assert optax.tree.norm(optax.tree.sub(state.params, before)) > 1e-4
    assert jax.tree.structure(after[0]) == jax.tree.structure(after[1])
    for x, y in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5)
