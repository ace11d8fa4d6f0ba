"""The environments that come with rljax, and the wrappers that a config can put around any."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.envs import Box, check, vectorize
from rljax.envs.tictactoe import LINES, TicTacToe
from rljax.envs.wrappers import SelectObservation


def board(text):
    return jnp.asarray([{"x": 1, "o": -1, ".": 0}[c] for c in text.replace("/", "")], jnp.int8)


@pytest.mark.parametrize(
    ("before", "action", "reward", "over"),
    [
        ("xx./oo./...", 2, 1.0, True),  # a row
        ("x../.xo/o..", 8, 1.0, True),  # a diagonal
        ("xox/xoo/.x.", 6, 1.0, True),  # a column, with the board all but full
        ("xox/xoo/ox.", 8, 0.0, True),  # a draw by the last square
        ("xo./.../...", 1, -1.0, True),  # an occupied square loses
        ("x../.../...", 4, 0.0, False),
        ("oo./xxo/xo.", 8, -1.0, True),  # the opponent's only move wins
    ],
)
def test_moves_by_hand(before, action, reward, over):
    state, timestep = jax.jit(TicTacToe().step)(jax.random.key(0), board(before), jnp.int32(action))
    assert (float(timestep.reward), bool(timestep.terminated)) == (reward, over)
    assert not timestep.truncated
    if not over:
        assert int((state == -1).sum()) == int((board(before) == -1).sum()) + 1  # the opponent has moved
        np.testing.assert_array_equal(timestep.action_mask, state == 0)
        np.testing.assert_array_equal(timestep.observation, np.concatenate([state == 1, state == -1]))


@functools.cache
def best(position):
    """Expected reward of the best play from a position with the agent to move, by enumeration."""

    def has_line(p, mark):
        return any(all(p[i] == mark for i in line) for line in LINES.tolist())

    values = []
    for move in (i for i in range(9) if position[i] == 0):
        mine = (*position[:move], 1, *position[move + 1 :])
        if has_line(mine, 1):
            values.append(1.0)
            continue
        replies = [(*mine[:i], -1, *mine[i + 1 :]) for i in range(9) if mine[i] == 0]
        if not replies:
            values.append(0.0)
            continue
        outcomes = [-1.0 if has_line(r, -1) else best(r) if 0 in r else 0.0 for r in replies]
        values.append(sum(outcomes) / len(outcomes))
    return max(values)


def optimum():
    empty = (0,) * 9
    second = [best((*empty[:i], -1, *empty[i + 1 :])) for i in range(9)]
    return 0.5 * (best(empty) + sum(second) / 9)


def test_the_optimum_is_known():
    """What `experiments/ppo_tictactoe.toml` is measured against."""
    assert optimum() == pytest.approx(0.9598, abs=1e-4)


def test_random_play_keeps_to_the_rules():
    envs = vectorize(TicTacToe(), 64)
    check(TicTacToe())

    def step(carry, key):
        state, timestep = carry
        action = jnp.argmax(jnp.where(timestep.action_mask, jax.random.uniform(key, (64, 9)), -1.0), -1)
        return envs.step(key, state, action), (state.env, timestep)

    carry = envs.reset(jax.random.key(0))
    _, (boards, timesteps) = jax.jit(lambda c: jax.lax.scan(step, c, jax.random.split(jax.random.key(1), 50)))(carry)
    marks = np.asarray(boards, int).sum(-1)
    assert set(np.unique(marks)) == {-1, 0}  # the agent is to move: it is level, or the opponent began
    assert np.asarray(timesteps.action_mask).any(-1).all()
    done = np.asarray(timesteps.done)
    lengths = np.asarray(timesteps.info["episode_length"])[done]
    assert lengths.min() >= 2 and lengths.max() <= 5
    wins, losses = ((np.asarray(timesteps.reward)[done] == r).mean() for r in (1.0, -1.0))
    assert wins == pytest.approx(losses, abs=0.08)  # both play at random, and either begins


def test_stateless_cartpole_shows_positions_alone():
    env, whole = rljax.make_env("StatelessCartPole"), rljax.make_env("CartPole-v1")
    check(env)
    assert env.observation_space.shape == (2,)
    key = jax.random.key(0)
    state, timestep = env.reset(key)
    full_state, full = whole.reset(key)
    np.testing.assert_array_equal(timestep.observation, full.observation[jnp.array([0, 2])])
    _, timestep = env.step(key, state, jnp.int32(1))
    _, full = whole.step(key, full_state, jnp.int32(1))
    np.testing.assert_array_equal(timestep.next_observation, full.next_observation[jnp.array([0, 2])])
    assert rljax.make_env("StatelessCartPole", gravity=5.0, time_limit=3).max_steps == 3
    with pytest.raises(ValueError, match="flat Box"):
        SelectObservation(rljax.make_env("FrozenLake-misc"), (0,))
    assert isinstance(env.observation_space, Box)


def test_rewards_can_be_scaled_by_a_traced_number():
    def reward(scale):
        env = rljax.make_env("CartPole-v1", reward_scale=scale)
        state, timestep = env.reset(jax.random.key(0))
        return timestep.reward, env.step(jax.random.key(0), state, jnp.int32(0))[1].reward

    np.testing.assert_array_equal(jax.vmap(reward)(jnp.array([1.0, 1000.0])), [[0.0, 0.0], [1.0, 1000.0]])
