"""Wrappers whose tests stand nowhere else: `Randomized`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import check, make_env, vectorize
from rljax.experiment import InputError, load, parse_overrides

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


@pytest.fixture(scope="module")
def rollout():
    """300 steps of 8 carts that are always pushed to the right: ``first, (states before, time steps, states after)``."""
    ranges = {"gravity": {"low": 5.0, "high": 15.0}, "length": {"low": 0.3, "high": 0.6}}
    env = make_env("CartPole-v1", **ranges, time_limit=20)
    check(env)
    envs = vectorize(env, 8)

    @jit
    def run(key):
        state, first = envs.reset(key)

        def step(state, key):
            after, timestep = envs.step(key, state, jnp.ones(8, jnp.int32))
            return after, (state, timestep, after)

        return first, jax.lax.scan(step, state, jax.random.split(key, 300))[1]

    return run(jax.random.key(0))


def test_each_episode_has_values_of_its_own_that_stay(rollout):
    _, (before, timesteps, after) = rollout
    (_, drawn), _ = before.env
    (_, drawn_after), _ = after.env
    for name, low, high in (("gravity", 5.0, 15.0), ("length", 0.3, 0.6)):
        changed = drawn_after[name] != drawn[name]
        np.testing.assert_array_equal(changed, timesteps.done)
        values = np.asarray(drawn_after[name])[np.asarray(timesteps.done)]
        assert len(values) > 100
        assert len(np.unique(values)) == len(values)
        assert low <= values.min() < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < values.max() < high
        np.testing.assert_allclose(values.mean(), (low + high) / 2, atol=4 * (high - low) / np.sqrt(12 * len(values)))
    np.testing.assert_allclose(np.corrcoef(np.ravel(drawn["gravity"]), np.ravel(drawn["length"]))[0, 1], 0.0, atol=0.3)


def test_a_step_is_that_of_the_environment_with_those_values(rollout):
    _, (before, timesteps, _) = rollout
    (inner, drawn), _ = before.env
    for t, i in ((0, 0), (3, 5), (100, 7)):
        values = {name: x[t, i] for name, x in drawn.items()}
        _, plain = make_env("CartPole-v1", **values).step(jax.random.key(0), jax.tree.map(lambda x: x[t, i], inner), 1)  # noqa: B023
        np.testing.assert_allclose(plain.next_observation, timesteps.next_observation[t, i], rtol=1e-5, atol=1e-6)


def test_a_limit_around_it_truncates(rollout):
    _, (_, timesteps, _) = rollout
    assert timesteps.terminated.any()
    np.testing.assert_array_equal(timesteps.truncated, ~timesteps.terminated & (timesteps.info["episode_length"] == 20))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env_params.gravity {low=5.0,high=5.0}", "env_params.gravity: low must be below high"),
        ("--env_params.gravity {low='a',high=5.0}", "env_params.gravity.low must be a number, got 'a'"),
        (
            "--env_params.gravity {low=5.0,height=6.0}",
            "env_params.gravity must be a number or a range, as { low = 0.5, high = 1.5 }",
        ),
        ("--env_params.gravity {low=1}", "env_params.gravity must be a number or a range, .*; {'low': 1} lacks high"),
        ("--env_params.gravity {high=2}", "env_params.gravity must be a number or a range, .*; {'high': 2} lacks low"),
        ("--env_params.gravity {}", "{} lacks low and high"),
        ("--env_params.gravity {low=1,high=2,step=3}", "'step' is no key of one"),
        ("--env_params.gravity {low=6.0,high=5.0}", "env_params.gravity: low must be below high, got {'low': 6.0, 'high': 5.0}"),
        ("--env_params.gravity {low=1.0,high=inf}", "env_params.gravity.high must be a number, got inf"),
        ("--env_params.gravity {low=nan,high=1.0}", "env_params.gravity.low must be a number, got nan"),
        (
            "--env_params.gravity {low={low=1,high=2},high=3}",
            "env_params.gravity.low must be a number, got {'low': 1, 'high': 2}",
        ),
        ("--env_params.gravity {low=0,high=1e39}", "env_params.gravity.high must be a number that float32 can hold"),
        ("--env_params.gravity {low=5.0,high=5.00000001}", "low must be below high, .* (the same in float32)"),
        ("--sweep.env_params.gravity {low=1} 9.8", "sweep.env_params.gravity must be a number or a range"),
        ("--env_params.time_limit {low=5,high=50}", "env_params.time_limit must be a number"),
        ("--env_params.max_steps_in_episode {low=5,high=50}", "cannot be drawn for each episode"),
    ],
)
def test_wrong_ranges_are_one_line(flags, message):
    def make():
        config = load(None, {"env": "CartPole-v1", "total_steps": 1000, **parse_overrides(flags.split())})
        return make_env(config.env, **config.env_params)

    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises((InputError, ValueError), match=pattern) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [{"low": 1}, {"low": "a", "high": 2}, {"low": 2, "high": 1}])
def test_wrong_ranges_given_to_make_env(value):
    with pytest.raises(ValueError, match=r"env_params\.gravity"):
        make_env("CartPole-v1", gravity=value)


def test_ranges_and_values_of_numpy():
    task = {"env": "CartPole-v1", "total_steps": 1}
    config = load(None, {**task, "env_params.gravity": {"low": np.float32(5), "high": np.int64(15)}})
    assert config.hash == load(None, {**task, "env_params.gravity": {"low": 5, "high": 15}}).hash
    swept = load(None, {**task, "sweep.env_params.gravity": np.linspace(5, 15, 3)})
    assert swept.sweep == {"env_params.gravity": (5.0, 10.0, 15.0)}


def test_a_config_keeps_its_ranges(tmp_path):
    config = tmp_path / "e.toml"
    config.write_text(
        'env = "CartPole-v1"\ntotal_steps = 1000\n[env_params]\ngravity = { low = 5, high = 15 }\n'
        "[sweep]\nenv_params.length = [0.4, 0.5]\n"
    )
    experiment = load(config)
    assert experiment.env_params == {"gravity": {"low": 5.0, "high": 15.0}}
    again = tmp_path / "again.toml"
    again.write_text(experiment.to_toml())
    assert load(again).hash == experiment.hash
    assert len(experiment.programs()) == 1  # another parameter beside it is still traced
