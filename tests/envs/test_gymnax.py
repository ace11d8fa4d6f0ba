import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import check, env_parameters, make_env, vectorize
from rljax.envs.gymnax import EXCLUDED, names

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here

# gymnax's own observations leave its own observation space.
TOO_SMALL_A_SPACE = {"MemoryChain-bsuite", "GaussianBandit-misc"}


def test_gymnax_is_all_there():
    import gymnax

    assert set(names()) | set(EXCLUDED) == set(gymnax.registered_envs)
    assert len(names()) == len(set(names())) >= 25


@pytest.mark.parametrize("name", names())
def test_every_environment_keeps_the_contract(name):
    env = make_env(name)
    check(env, name)
    limit = env_parameters(name)["max_steps_in_episode"]

    def run(key):
        state, first = env.reset(key)
        action = env.action_space.sample(key)
        before = jax.tree.map(lambda x: jnp.stack([x, x]), state)
        before = before.replace(time=before.time.at[1].set(limit - 1))  # one step before the time limit
        _, second = jax.vmap(env.step, (None, 0, None))(key, before, action)
        inside = [env.observation_space.contains(x) for x in (first.observation, second.observation[0])]
        return first, second, jnp.stack(inside).all(), env.action_space.contains(action)

    first, second, inside, action_inside = jit(run)(jax.random.key(0))
    assert (first.observation.shape, first.observation.dtype) == (env.observation_space.shape, env.observation_space.dtype)
    assert action_inside
    assert inside or name in TOO_SMALL_A_SPACE
    assert not first.done
    assert first.reward == 0.0
    # The limit truncates, and terminates nothing.
    np.testing.assert_array_equal(second.truncated, [False, True])
    assert second.terminated[0] == second.terminated[1]


def rollout(env, state, actions):
    def step(state, action):
        state, timestep = env.step(jax.random.key(0), state, action)
        return state, (timestep, state)

    return jax.lax.scan(step, state, actions)[1]


def test_cartpole_follows_gymnasium_step_by_step():
    ours = make_env("CartPole-v1")
    actions = np.random.default_rng(0).integers(0, 2, (16, 40)).astype(np.int32)

    @jit
    def run(keys):
        def one(key, actions):
            state, first = ours.reset(key)
            return first.observation, rollout(ours, state, actions)[0]

        return jax.vmap(one)(keys, actions)

    first, steps = run(jax.random.split(jax.random.key(0), 16))
    theirs, ended = gymnasium.make("CartPole-v1").unwrapped, 0
    for b in range(16):
        theirs.reset()
        theirs.state = np.asarray(first[b], np.float64)
        for t in range(40):
            observation, reward, terminated, _, _ = theirs.step(int(actions[b, t]))
            np.testing.assert_allclose(steps.observation[b, t], observation, rtol=1e-4, atol=1e-5)
            assert (steps.reward[b, t], steps.terminated[b, t], steps.truncated[b, t]) == (reward, terminated, False)
            if terminated:
                ended += 1
                break
    assert ended >= 8


def test_pendulum_follows_gymnasium_step_by_step():
    ours, theirs = make_env("Pendulum-v1"), gymnasium.make("Pendulum-v1").unwrapped
    actions = np.random.default_rng(0).uniform(-2.5, 2.5, (8, 30, 1)).astype(np.float32)  # some beyond the torque limit

    @jit
    def run(keys):
        def one(key, actions):
            state, _ = ours.reset(key)
            return state, rollout(ours, state, actions)[0]

        return jax.vmap(one)(keys, actions)

    start, steps = run(jax.random.split(jax.random.key(0), 8))
    for b in range(8):
        theirs.reset()
        theirs.state = np.array([start.theta[b], start.theta_dot[b]], np.float64)
        for t in range(30):
            observation, reward, terminated, _, _ = theirs.step(actions[b, t])
            np.testing.assert_allclose(steps.observation[b, t], observation, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(steps.reward[b, t], reward, rtol=1e-3, atol=1e-3)
            assert not terminated
            assert not steps.terminated[b, t]


def test_pendulum_truncates_at_200_and_never_terminates():
    env = vectorize(make_env("Pendulum-v1"), 3)

    @jit
    def run(key):
        state, _ = env.reset(key)

        def step(state, key):
            action = jax.random.uniform(key, (3, 1), minval=-2.0, maxval=2.0)
            return env.step(key, state, action)

        return jax.lax.scan(step, state, jax.random.split(key, 410))[1]

    steps = run(jax.random.key(0))
    assert not steps.terminated.any()
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated.all(1)), [199, 399])
    assert steps.truncated.sum() == 6
    # What followed the cut is a new episode; the state that was cut is still there.
    assert np.abs(steps.observation[199] - steps.next_observation[199]).max() > 0.1


def test_cartpole_truncates_at_500():
    # Balanced by hand: push to where the pole falls.
    env = make_env("CartPole-v1")

    @jit
    def run(key):
        def step(carry, _):
            state, observation = carry
            action = (observation @ jnp.array([0.05, 0.2, 1.0, 0.5]) > 0).astype(jnp.int32)
            state, timestep = env.step(key, state, action)
            return (state, timestep.observation), timestep

        state, first = env.reset(key)
        return jax.lax.scan(step, (state, first.observation), None, length=500)[1]

    steps = run(jax.random.key(0))
    assert not steps.terminated.any()
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated), [499])


def test_a_swept_parameter_changes_the_outcome():
    actions = jnp.zeros(12, jnp.int32)

    def end(gravity):
        env = make_env("CartPole-v1", gravity=gravity)
        state, _ = env.reset(jax.random.key(0))
        return rollout(env, state, actions)[0].observation[-1]

    swept = jit(jax.vmap(end))(jnp.array([1.0, 9.8, 20.0]))
    np.testing.assert_allclose(swept[1], jit(lambda: end(9.8))(), rtol=1e-5)
    angle = np.asarray(swept[:, 2])
    assert np.all(np.diff(angle) > 1e-3)  # the cart runs left, so the pole falls right: the faster, the more gravity


def test_a_swept_limit_bounds_the_actions():
    def high(torque):
        return make_env("Pendulum-v1", max_torque=torque).action_space.sample(jax.random.key(0))

    a, b = jit(jax.vmap(high))(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(3 * a, b, rtol=1e-6)


def test_constructor_arguments_and_parameters_mix():
    env = make_env("Catch-bsuite", rows=6, columns=3, max_steps_in_episode=50)
    assert env.observation_space.shape == (6, 3)
    assert env_parameters("Catch-bsuite") == {"rows": 10, "columns": 5, "max_steps_in_episode": 1000}
