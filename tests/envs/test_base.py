import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import Box, Discrete, MultiDiscrete, check, restart, transition


class Good:
    """Counts its steps; tests break it in one place at a time."""

    observation_space, action_space = Box(0.0, np.inf, (2,)), Discrete(3)

    def reset(self, key):
        return {"count": jnp.int32(0)}, restart(jnp.zeros(2), info={"luck": jnp.float32(0)})

    def step(self, key, state, action):
        count = state["count"] + 1
        return {"count": count}, transition(jnp.full(2, count, jnp.float32), 1, count > 3, info={"luck": jnp.float32(1)})


def breaks(**change):
    """A `Good` whose time steps after a step have other fields."""

    class Broken(Good):
        def step(self, key, state, action):
            state, timestep = super().step(key, state, action)
            return state, timestep.replace(**change)

    return Broken()


def test_a_good_environment_passes():
    check(Good())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observation": jnp.zeros(2, jnp.int32)}, ["[1].observation", "float32[2] after reset", "int32[2] after step"]),
        ({"observation": jnp.zeros(3)}, ["[1].observation", "float32[2] after reset", "float32[3] after step"]),
        ({"next_observation": jnp.zeros((1, 2))}, ["[1].next_observation", "float32[1, 2] after step"]),
        ({"reward": jnp.int32(1)}, ["[1].reward", "float32[] after reset", "int32[] after step"]),
        ({"reward": jnp.zeros(1)}, ["[1].reward", "float32[1] after step"]),
        ({"terminated": jnp.float32(0)}, ["[1].terminated", "bool[] after reset", "float32[] after step"]),
        ({"info": {}}, ["different structures", "[1].info['luck']"]),
        ({"action_mask": jnp.ones(3, bool)}, ["different structures", "[1].action_mask"]),
    ],
)
def test_the_first_leaf_that_differs_is_named(change, words):
    with pytest.raises(TypeError) as error:
        check(breaks(**change), "my env")
    message = str(error.value)
    assert message.startswith("my env: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_state_that_differs_is_named():
    class Broken(Good):
        def step(self, key, state, action):
            return {"count": state["count"] + 0.5}, super().step(key, state, action)[1]

    with pytest.raises(TypeError, match=r"\[0\]\['count'\] is int32\[\] after reset, float32\[\] after step"):
        check(Broken())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": jnp.int32(1)}, "reward must be float32[], is int32[]"),
        ({"truncated": jnp.zeros(1, bool)}, "truncated must be bool[], is bool[1]"),
        ({"action_mask": jnp.ones(2, bool)}, "action_mask must be bool[3]"),
        ({"action_mask": jnp.ones(3)}, "action_mask must be bool[3]"),
    ],
)
def test_agreeing_on_a_wrong_type_is_caught_too(change, words):
    class Broken(Good):
        def reset(self, key):
            state, timestep = super().reset(key)
            return state, timestep.replace(**change)

        def step(self, key, state, action):
            state, timestep = super().step(key, state, action)
            return state, timestep.replace(**change)

    with pytest.raises(TypeError) as error:
        check(Broken())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("space", "size", "passes"),
    [
        (Discrete(3), 3, True),
        (MultiDiscrete((2, 2)), 4, True),
        (MultiDiscrete((2, 2)), 2, False),
        (Box(0.0, 1.0, (3,)), 3, False),
    ],
)
def test_masks_belong_to_discrete_actions(space, size, passes):
    class Masked(Good):
        action_space = space

        def reset(self, key):
            state, timestep = super().reset(key)
            return state, timestep.replace(action_mask=jnp.ones(size, bool))

        def step(self, key, state, action):
            state, timestep = super().step(key, state, action)
            return state, timestep.replace(action_mask=jnp.ones(size, bool))

    if passes:
        check(Masked())
    else:
        with pytest.raises(TypeError, match="action_mask"):
            check(Masked())


def test_forgetting_the_time_step_is_explained():
    class Broken(Good):
        def step(self, key, state, action):
            return state, (jnp.zeros(2), 1.0, False)

    with pytest.raises(TypeError, match="must return \\(state, TimeStep\\)"):
        check(Broken())


def test_restart_and_transition_fix_the_types():
    first, later = restart(jnp.zeros(2)), transition(jnp.ones(2), 3, np.bool_(True), jnp.array([False]))
    assert jax.tree.structure(first) == jax.tree.structure(later)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(later), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert (first.reward, first.done, later.reward, later.terminated, later.truncated) == (0.0, False, 3.0, True, False)
    np.testing.assert_array_equal(later.next_observation, later.observation)


@pytest.mark.parametrize(("terminated", "truncated"), [(False, False), (False, True), (True, False), (True, True)])
def test_done_is_either_flag(terminated, truncated):
    assert transition(jnp.zeros(2), 0.0, terminated, truncated).done == (terminated or truncated)
