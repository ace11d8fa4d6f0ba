import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from rljax.envs import check, env_names, env_parameters, make_env, playground, vectorize
from rljax.experiment.painters import painter

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
is_installed = importlib.util.find_spec("mujoco_playground") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="needs the extra playground")


class Model(struct.PyTreeNode):
    gravity: jax.Array
    body_mass: jax.Array
    body_inertia: jax.Array

    @property
    def opt(self):
        return types.SimpleNamespace(gravity=self.gravity)

    def tree_replace(self, values):
        return self.replace(**{key.split(".")[-1]: value for key, value in values.items()})


class State(struct.PyTreeNode):
    obs: dict
    reward: jax.Array
    done: jax.Array


class Falling:
    """A stone falls from 10; done below 0. In the way of Playground: its model is looked up at each step."""

    action_size = 2

    def __init__(self, dt):
        self.dt = dt
        self._mjx_model = Model(jnp.array([0.0, 0.0, -10.0]), jnp.ones(3), jnp.ones((3, 3)))

    @property
    def mjx_model(self):
        return self._mjx_model

    def reset(self, key):
        del key
        return self._state(jnp.array([10.0, 0.0]))

    def step(self, state, action):
        del action
        height, speed = state.obs["privileged_state"]
        speed = speed + self.dt * self.mjx_model.opt.gravity[2]
        return self._state(jnp.array([height + self.dt * speed, speed]))

    @staticmethod
    def _state(x):
        return State({"state": x[:1], "privileged_state": x}, x[0], jnp.where(x[0] < 0, 1.0, 0.0))


class Config(dict):
    def to_dict(self):
        return dict(self)


def load(name, config_overrides):
    assert name == "Falling"
    assert config_overrides["impl"] == "jax"
    return Falling(config_overrides["timing.dt"])


FAKE = types.SimpleNamespace(
    ALL_ENVS=("Falling",),
    get_default_config=lambda name: Config(
        episode_length=100, impl="warp", action_repeat=1, vision=False, vision_config={"cam": 1}, timing={"dt": 0.1}
    ),
    load=load,
)


@pytest.fixture
def fake(monkeypatch):
    playground._load.cache_clear()
    monkeypatch.setattr(playground, "_registry", lambda: FAKE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "mujoco_playground")
    yield
    playground._load.cache_clear()


def heights(env, steps):
    @jit
    def run():
        state, first = env.reset(jax.random.key(0))

        def step(state, _):
            return env.step(jax.random.key(0), state, jnp.zeros(2))

        return first, jax.lax.scan(step, state, None, length=steps)[1]

    return run()


def test_its_own_config_is_what_can_be_set(fake):
    assert env_parameters("playground/Falling") == {
        "episode_length": 100, "impl": "jax", "timing.dt": 0.1, "obs": "state",
        "gravity_scale": 1.0, "friction_scale": 1.0, "mass_scale": 1.0, "damping_scale": 1.0,
    }  # fmt: skip
    assert "playground/Falling" in env_names()


def test_the_contract_and_both_flags(fake):
    env = make_env("playground/Falling")
    check(env)
    assert env.observation_space.shape == (1,)
    first, steps = heights(env, 20)
    np.testing.assert_allclose(first.observation, [10.0])
    expected = 10 - 0.1 * np.cumsum(np.arange(1, 21))
    np.testing.assert_allclose(steps.observation[:, 0], expected, atol=1e-4)
    np.testing.assert_array_equal(steps.terminated, expected < -1e-4)
    short = heights(make_env("playground/Falling", episode_length=5), 5)[1]
    np.testing.assert_array_equal(short.truncated, np.arange(5) == 4)
    assert not short.terminated.any()


def test_the_entry_of_the_observation_is_chosen(fake):
    assert make_env("playground/Falling", obs="privileged_state").observation_space.shape == (2,)
    with pytest.raises(ValueError, match=r"env_params\.obs must be one of privileged_state, state, got 'stat'"):
        make_env("playground/Falling", obs="stat")


def test_scales_of_the_model_are_lanes_of_one_program(fake):
    def last(scale):
        env = make_env("playground/Falling", gravity_scale=scale)
        state, _ = env.reset(jax.random.key(0))
        return env.step(jax.random.key(0), state, jnp.zeros(2))[1].observation[0]

    np.testing.assert_allclose(jit(jax.vmap(last))(jnp.array([0.0, 1.0, 2.0])), [10.0, 9.9, 9.8], atol=1e-5)
    np.testing.assert_allclose(last(1.0), 9.9, atol=1e-5)  # the environment that is kept is not changed


def test_scales_drawn_for_each_episode(fake):
    envs = vectorize(make_env("playground/Falling", gravity_scale={"low": 0.5, "high": 2.0}, mass_scale=1.5), 64, reset_pool=32)
    state, _ = jit(envs.reset)(jax.random.key(0))
    _, timestep = jit(envs.step)(jax.random.key(1), state, jnp.zeros((64, 2)))
    fallen = 10 - timestep.observation[:, 0]
    assert 0.05 <= fallen.min() < 0.08
    assert 0.17 < fallen.max() < 0.2


@pytest.mark.parametrize("key", ["timing.dt", "episode_length", "impl"])
def test_what_the_environment_needs_as_a_number_is_not_drawn(fake, key):
    with pytest.raises(ValueError, match=rf"env_params.{key} of playground/Falling cannot be drawn"):
        make_env("playground/Falling", **{key: {"low": 0.1, "high": 0.2}})


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rljax\[playground\]'"):
        make_env("playground/CartpoleBalance")
    assert playground.names() == []


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("name", ["CartpoleBalance", "PendulumSwingup", "CheetahRun"])
def test_the_real_ones_keep_the_contract(name):
    env = make_env(f"playground/{name}", gravity_scale={"low": 0.9, "high": 1.1})
    check(env, name)
    state, first = jit(env.reset)(jax.random.key(0))
    _, timestep = jit(env.step)(jax.random.key(1), state, jnp.zeros(env.action_space.shape))
    assert np.isfinite(first.observation).all()
    assert np.isfinite(timestep.observation).all()
    assert 0.0 <= timestep.reward <= 1.0
    artist = painter(env)
    (frame,) = artist.paint(jax.tree.map(lambda x: np.asarray(x)[None], artist.keep(state)))
    assert frame.shape[1:] == (320, 3)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 4  # bodies, and not the ground alone
