import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import check, env_parameters, make_env, vectorize
from rljax.envs.brax import BACKENDS, names

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


slow = pytest.mark.slow
SIZES = {  # of observations and actions
    "ant": (27, 8), "fast": (2, 1), "halfcheetah": (17, 6), "hopper": (11, 3), "humanoid": (244, 17),
    "humanoidstandup": (244, 17), "inverted_pendulum": (4, 1), "inverted_double_pendulum": (8, 1), "pusher": (23, 7),
    "reacher": (11, 2), "swimmer": (8, 2), "walker2d": (17, 6),
}  # fmt: skip
# Each environment once where it is traced fastest, and some in the default backend; tracing all takes minutes.
QUICK = dict.fromkeys(SIZES, "spring") | dict.fromkeys(["fast", "reacher", "swimmer"], "generalized")
QUICK["inverted_pendulum"] = "mjx"


def test_brax_is_all_there():
    assert set(names()) == set(SIZES)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[] if QUICK[name] == backend else slow)
        for name in SIZES
        for backend in (BACKENDS if name != "swimmer" else ["generalized"])
    ],
)
def test_every_environment_keeps_the_contract(name, backend):
    env = make_env(f"brax/{name}", backend=backend)
    check(env, name)
    assert (env.observation_space.size, env.action_space.size) == SIZES[name]
    assert (env.action_space.low, env.action_space.high) == (-1.0, 1.0)


@pytest.mark.parametrize("backend", ["generalized", *(pytest.param(b, marks=slow) for b in BACKENDS if b != "generalized")])
def test_a_falling_pendulum_terminates(backend):
    env = make_env("brax/inverted_pendulum", backend=backend)

    @jit
    def run(key):
        state, first = env.reset(key)
        return first, jax.lax.scan(lambda state, _: env.step(key, state, jnp.ones(1)), state, None, length=20)[1]

    first, steps = run(jax.random.key(0))
    assert np.all(np.isfinite(steps.observation))
    assert np.all(np.isfinite(steps.reward))
    angle = np.concatenate([first.observation[None], steps.observation])[:, 1]
    np.testing.assert_array_equal(steps.terminated, np.abs(angle[1:]) > 0.2)
    assert not steps.terminated[0]
    assert steps.terminated[-1]
    assert not steps.truncated.any()
    np.testing.assert_array_equal(steps.reward[~steps.terminated], 1.0)


def test_episodes_are_truncated_at_their_length():
    env = vectorize(make_env("brax/fast", episode_length=3), 2)

    @jit
    def run(key):
        state, _ = env.reset(key)
        action = jnp.zeros((2, *env.action_space.shape))
        return jax.lax.scan(lambda state, key: env.step(key, state, action), state, jax.random.split(key, 7))[1]

    steps = run(jax.random.key(0))
    np.testing.assert_array_equal(steps.truncated[:, 0], [False, False, True, False, False, True, False])
    assert not steps.terminated.any()


def test_resets_come_from_a_pool():
    state, _ = jax.eval_shape(vectorize(make_env("brax/fast"), 2).reset, jax.random.key(0))
    assert state.pool[1].reward.shape == (256,)


def test_a_constructor_argument_may_be_traced():
    @jit
    def reward(weight):
        env = make_env("brax/ant", backend="spring", ctrl_cost_weight=weight)
        state, _ = env.reset(jax.random.key(0))
        return env.step(jax.random.key(0), state, jnp.full(8, 0.5))[1].reward

    # The control cost is the weight times the sum of the squared actions, 8 / 4.
    assert float(reward(0.0) - reward(0.75)) == pytest.approx(1.5, rel=1e-4)


def test_parameters():
    parameters = env_parameters("brax/ant")
    assert (parameters["backend"], parameters["episode_length"], parameters["ctrl_cost_weight"]) == ("generalized", 1000, 0.5)


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match=r"env_params\.backend must be one of .*, got 'mujoco'"):
        make_env("brax/fast", backend="mujoco")
    with pytest.raises(ValueError, match=r"env_params\.ctrl_cost_wight for brax/ant; did you mean 'ctrl_cost_weight'"):
        make_env("brax/ant", ctrl_cost_wight=1.0)


def test_dictionary_observations_are_refused():
    with pytest.raises(TypeError, match="dictionary observations"):
        make_env("brax/fast", obs_mode="dict_state")
