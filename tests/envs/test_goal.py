"""The goal with its two shapings: rewards by hand, and what the best policies are, by value iteration on the study's numbers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import experiment
from rljax.envs import check, make_env
from rljax.envs.goal import GoalGrid
from rljax.envs.wrappers import as_evaluated

STUDY = Path(__file__).parents[2] / "experiments" / "studies" / "shaping.toml"
UP, RIGHT, DOWN, LEFT = range(4)


@pytest.mark.parametrize(
    ("place", "steps", "action", "cell", "reward", "flags"),
    [
        ((0, 0), 0, RIGHT, 1, 0.5 + 0.2 * (4 - 0.9 * 3), (False, False)),
        ((0, 0), 0, DOWN, 3, 0.5 + 0.2 * (4 - 0.9 * 3), (False, False)),
        ((0, 1), 1, LEFT, 0, 0.2 * (3 - 0.9 * 4), (False, False)),
        ((1, 1), 2, UP, 1, 0.2 * (2 - 0.9 * 3), (False, False)),
        ((0, 0), 0, UP, 0, 0.2 * (4 - 0.9 * 4), (False, False)),  # the edge
        ((2, 1), 3, RIGHT, 8, 1 + 0.5 + 0.2 * 1, (True, False)),
        ((0, 0), 6, RIGHT, 1, 0.5 + 0.2 * (4 - 0.9 * 3), (False, True)),  # a cut state keeps its potential
        ((1, 2), 6, DOWN, 8, 1 + 0.5 + 0.2 * 1, (True, False)),  # the goal at the last step
    ],
)
def test_steps_by_hand(place, steps, action, cell, reward, flags):
    env = GoalGrid(size=3, max_steps=7, approach_bonus=0.5, potential=0.2, discount=0.9)
    state = (jnp.array(place, jnp.int32), jnp.int32(steps))
    (_, after), timestep = jax.jit(env.step)(jax.random.key(0), state, jnp.int32(action))
    assert (int(timestep.observation), int(after)) == (cell, steps + 1)
    assert float(timestep.reward) == pytest.approx(reward, abs=1e-6)
    assert (bool(timestep.terminated), bool(timestep.truncated)) == flags


def play(env, actions):
    """``(rewards [T], distances [T], terminated [T], truncated [T])``, going on after the end."""

    def step(state, action):
        state, timestep = env.step(jax.random.key(0), state, action)
        return state, (timestep.reward, 2 * (env.size - 1) - state[0].sum(), timestep.terminated, timestep.truncated)

    return jax.lax.scan(step, env.reset(jax.random.key(0))[0], actions)[1]


def test_potential_terms_telescope_over_any_trajectory():
    def play_all(weight):
        env = GoalGrid(size=3, max_steps=12, potential=weight, discount=0.9)
        return jax.vmap(lambda actions: play(env, actions))(jax.random.randint(jax.random.key(0), (200, 12), 0, 4))

    played = jax.jit(jax.vmap(play_all))(jnp.array([0.0, 0.7]))
    (without, rewards), (_, distances), (_, terminated), (_, truncated) = map(np.asarray, played)
    ends = (terminated | truncated).argmax(1)
    for i, end in enumerate(ends):
        total = np.sum(0.9 ** np.arange(end + 1) * (rewards - without)[i, : end + 1])
        assert total == pytest.approx(0.9 ** (end + 1) * -0.7 * distances[i, end] + 0.7 * 4, abs=1e-5)
    reached = terminated[np.arange(200), ends]
    assert 20 < reached.sum() < 180 and len(set(distances[~reached, -1])) > 2  # ends of both kinds, at several distances


def test_evaluations_have_no_shaping():
    env = make_env("GoalGrid", size=3, approach_bonus=0.5, potential=0.2, reward_scale=10.0, time_limit=6)
    check(env)
    for actions, total in (([RIGHT, RIGHT, DOWN, DOWN], 1.0), ([RIGHT, LEFT, RIGHT, LEFT], 0.0)):
        for made, expected in ((as_evaluated(env), total), (GoalGrid(size=3), total)):
            state, _ = made.reset(jax.random.key(0))
            rewards = []
            for action in actions:
                state, timestep = made.step(jax.random.key(0), state, jnp.int32(action))
                rewards.append(float(timestep.reward))
            assert sum(rewards) == expected
            assert bool(timestep.terminated) == bool(total)


def test_a_goal_at_the_start_raises():
    with pytest.raises(ValueError, match="size must be 2 or more, got 1"):
        make_env("GoalGrid", size=1)


STUDIED = experiment.load(STUDY)
SIZE, DISCOUNT = STUDIED.env_params["size"], STUDIED.algo.discount
BONUS, WEIGHT = STUDIED.sweep["env_params.approach_bonus"][1], STUDIED.sweep["env_params.potential"][1]
PLACES = np.stack(np.divmod(np.arange(SIZE**2 - 1), SIZE), axis=1)  # all but the goal, which is the last cell
DISTANCES = 2 * (SIZE - 1) - PLACES.sum(1)


@pytest.fixture(scope="module")
def action_values():
    """{(approach_bonus, potential): Q* ``[S, 4]``} of the study's four settings, whose lanes are one program."""
    pairs = [(bonus, weight) for bonus in (0.0, BONUS) for weight in (0.0, WEIGHT)]

    def transitions(bonus, weight):
        env = make_env("GoalGrid", **STUDIED.env_params, approach_bonus=bonus, potential=weight)

        def step(place, action):
            _, timestep = env.step(jax.random.key(0), (place, jnp.int32(0)), action)
            return timestep.next_observation, timestep.reward, timestep.terminated

        return jax.vmap(lambda place: jax.vmap(lambda action: step(place, action))(jnp.arange(4)))(jnp.asarray(PLACES))

    traced = jax.jit(jax.vmap(transitions))(*jnp.array(pairs).T)
    values = {}
    for pair, following, rewards, terminated in zip(pairs, *map(np.asarray, traced), strict=True):
        q = np.zeros((SIZE**2 - 1, 4))
        for _ in range(2000):  # 0.99^2000 is 2e-9
            value = np.append(q.max(1), 0.0)
            q = rewards + DISCOUNT * np.where(terminated, 0.0, value[following])
        values[pair] = q
    return values


def best(q):
    return q > q.max(1, keepdims=True) - 2e-4  # the nearest second best is 1e-3 behind


def test_the_study_s_potential_is_of_the_agent_s_discount():
    assert STUDIED.env_params["discount"] == DISCOUNT
    assert len(STUDIED.programs()) == 1 and len(STUDIED.lanes()) == 40


def test_a_potential_leaves_the_best_policies_as_they_are(action_values):
    bare, shaped = action_values[0.0, 0.0], action_values[0.0, WEIGHT]
    np.testing.assert_allclose(bare.max(1), DISCOUNT ** (DISTANCES - 1.0), atol=1e-5)
    np.testing.assert_array_equal(best(bare)[:, [RIGHT, DOWN]], PLACES[:, ::-1] < SIZE - 1)
    assert not best(bare)[:, [UP, LEFT]].any()
    np.testing.assert_array_equal(best(shaped), best(bare))
    np.testing.assert_allclose(shaped, bare + WEIGHT * DISTANCES[:, None], atol=1e-4)  # Q - Phi
    # Nor does it mend the bonus: the best policies are those of the reward that it is added to.
    np.testing.assert_array_equal(best(action_values[BONUS, WEIGHT]), best(action_values[BONUS, 0.0]))


def test_a_bonus_makes_the_loop_better_than_the_goal(action_values):
    q = action_values[BONUS, 0.0]
    to_goal = BONUS * (1 - DISCOUNT**DISTANCES) / (1 - DISCOUNT) + DISCOUNT ** (DISTANCES - 1.0)
    away_and_back = BONUS * DISCOUNT / (1 - DISCOUNT**2)
    assert to_goal[DISTANCES == 1] == pytest.approx(BONUS + 1)
    assert to_goal[0] == pytest.approx(3.986, abs=1e-3) and away_and_back == pytest.approx(4.975, abs=1e-3)
    # The best is to walk up to the goal and to turn there, from everywhere.
    walk = DISTANCES - 1.0
    np.testing.assert_allclose(
        q.max(1), BONUS * (1 - DISCOUNT**walk) / (1 - DISCOUNT) + DISCOUNT**walk * away_and_back, atol=1e-4
    )
    assert (q.max(1) > to_goal + 1).all()
    beside = DISTANCES == 1
    into_goal = np.array([[False, False, True, False], [False, True, False, False]])  # from above it, and from its left
    np.testing.assert_array_equal(PLACES[beside], [[SIZE - 2, SIZE - 1], [SIZE - 1, SIZE - 2]])
    np.testing.assert_allclose(q[beside][into_goal], BONUS + 1, atol=1e-6)
    assert not (best(q)[beside] & into_goal).any()
