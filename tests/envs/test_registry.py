import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import Box, Discrete, TimeLimit, env_names, env_parameters, make_env, register_env, registry, restart, transition


class Walk:
    """A user's environment: walk to ``goal``, or below 0."""

    observation_space, action_space = Box(-1.0, 100.0, ()), Discrete(2)

    def __init__(self, goal=3, *, start=1.0):
        self.goal, self.start = goal, start

    def reset(self, key):
        return jnp.float32(self.start), restart(jnp.float32(self.start))

    def step(self, key, state, action):
        state = state + 2.0 * action - 1.0
        return state, transition(state, state >= self.goal, (state < 0) | (state >= self.goal))


@pytest.fixture(autouse=True)
def forget_registrations(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def walk(env, actions):
    state, timestep = env.reset(jax.random.key(0))
    for action in actions:
        state, timestep = env.step(jax.random.key(0), state, jnp.int32(action))
    return timestep


def test_a_registered_environment_is_made_by_name():
    register_env("Walk", Walk)
    assert "Walk" in env_names()
    assert env_parameters("Walk") == {"goal": 3, "start": 1.0}
    timestep = walk(make_env("Walk", goal=2), [1])
    assert (timestep.observation, timestep.reward, timestep.terminated, timestep.truncated) == (2.0, 1.0, True, False)
    assert not walk(make_env("Walk"), [1]).done


def test_a_parameter_of_a_registered_environment_may_be_traced():
    register_env("Walk", Walk)
    done = jax.jit(jax.vmap(lambda goal: walk(make_env("Walk", goal=goal), [1]).terminated))(jnp.array([2.0, 3.0]))
    np.testing.assert_array_equal(done, [True, False])


@pytest.mark.parametrize("name", ["Walk", "CartPole-v1", "brax/ant"])
def test_a_taken_name_raises(name):
    register_env("Walk", Walk)
    with pytest.raises(ValueError, match=f"'{name}' exists already"):
        register_env(name, Walk)


def test_a_time_limit_can_be_put_around_any_environment():
    register_env("Walk", Walk)
    env = make_env("Walk", time_limit=2)
    assert isinstance(env, TimeLimit)
    assert [bool(walk(env, actions).truncated) for actions in ([0], [0, 1], [1, 1])] == [False, True, False]
    assert walk(env, [1, 1]).terminated
    assert make_env("CartPole-v1", time_limit=5).max_steps == 5


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("CartPol-v1", "'CartPole-v1'"),
        ("cartpole-v1", "'CartPole-v1'"),
        ("CartPole", "'CartPole-v1'"),
        ("brax/antt", "'brax/ant'"),
        ("Breakout", "'Breakout-MinAtar'"),
        ("wallk", "'Walk'"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, suggestion):
    register_env("Walk", Walk)
    for function in (make_env, env_parameters):
        with pytest.raises(ValueError, match="unknown env") as error:
            function(name)
        assert f"did you mean {suggestion}" in str(error.value)


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(ValueError, match="unknown env 'xyzzy'; `rljax list` shows all"):
        make_env("xyzzy")


@pytest.mark.parametrize(
    ("name", "key", "suggestion"),
    [
        ("CartPole-v1", "gravty", "gravity"),
        ("CartPole-v1", "timelimit", "time_limit"),
        ("Walk", "gaol", "goal"),
    ],
)
def test_an_unknown_parameter_gets_the_nearest_ones(name, key, suggestion):
    register_env("Walk", Walk)
    with pytest.raises(ValueError, match=rf"unknown key env_params\.{key} for {name}; did you mean .*'{suggestion}'"):
        make_env(name, **{key: 1.0})


def test_factories_may_take_any_parameter():
    register_env("Any", lambda **parameters: Walk(**parameters))
    assert make_env("Any", goal=7).goal == 7
    assert env_parameters("Any") == {}


def test_what_is_left_out_says_why():
    with pytest.raises(ValueError, match="'MNISTBandit-bsuite' is left out: it downloads its data"):
        make_env("MNISTBandit-bsuite")
    assert "MNISTBandit-bsuite" not in env_names()


def test_reset_and_step_must_agree():
    class Broken(Walk):
        def reset(self, key):
            return jnp.int32(1), restart(jnp.int32(1))

    register_env("Broken", Broken)
    with pytest.raises(TypeError, match=r"^Broken: \(state, timestep\)\[0\] is int32\[\] after reset, float32\[\] after step$"):
        make_env("Broken")


SOURCE = """
    import jax.numpy as jnp
    from rljax.envs import Box, Discrete, restart, transition

    class Counter:
        observation_space, action_space = Box(0.0, 100.0, ()), Discrete(2)

        def __init__(self, step_size={step_size}):
            self.step_size = step_size

        def reset(self, key):
            return jnp.float32(0.0), restart(jnp.float32(0.0))

        def step(self, key, state, action):
            state = state + self.step_size
            return state, transition(state, 1.0)
"""


def write(folder, step_size=2.0, name="my_counter_env.py"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(SOURCE.format(step_size=step_size)))
    return folder / name


def test_an_environment_from_a_file(tmp_path):
    name = f"{write(tmp_path)}:Counter"
    path = list(sys.path)
    assert env_parameters(name) == {"step_size": 2.0}
    assert walk(make_env(name), [0, 0]).observation == 4.0
    assert walk(make_env(name, step_size=0.5), [0, 0]).observation == 1.0
    assert sys.path == path


def test_files_of_one_name_in_two_folders_are_two_files(tmp_path):
    for step_size in (2.0, 3.0):
        file = write(tmp_path / str(step_size), step_size, "same_name_env.py")
        assert walk(make_env(f"{file}:Counter"), [0]).observation == step_size


def test_a_file_named_like_a_module_is_that_file(tmp_path):
    file = write(tmp_path, 5.0, "random.py")
    assert walk(make_env(f"{file}:Counter"), [0]).observation == 5.0


def test_an_environment_from_a_module_of_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path, 7.0, "module_env_for_test.py")
    monkeypatch.chdir(tmp_path)
    assert walk(make_env("module_env_for_test:Counter"), [0]).observation == 7.0
    assert walk(make_env("module_env_for_test.py:Counter"), [0]).observation == 7.0


def test_what_is_missing_is_named(tmp_path):
    file = write(tmp_path, name="another_counter_env.py")
    with pytest.raises(ValueError, match=r"no file .*nowhere\.py"):
        make_env(f"{tmp_path}/nowhere.py:Counter")
    with pytest.raises(ValueError, match="has no 'Conter'; did you mean 'Counter'"):
        make_env(f"{file}:Conter")
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        make_env("no_such_module:Counter")
