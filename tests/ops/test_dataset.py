"""Recorded steps by hand: episodes, what they still earn, and which are the best."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.ops import replay
from rljax.ops.dataset import among_best, make_dataset, sample

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


def recorded(rewards, terminated, truncated):
    rows = len(rewards)
    observation = np.arange(rows, dtype=np.float32)[:, None]
    flags = (np.isin(np.arange(rows), ends) for ends in (terminated, truncated))
    return make_dataset(
        replay.Transition(
            observation=observation,
            action_mask=None,
            action=np.zeros(rows, np.int32),
            reward=np.asarray(rewards, np.float32),
            terminated=next(flags),
            truncated=next(flags),
            next_observation=observation + 1,
            next_action_mask=None,
        )
    )


# Three episodes: the first terminates, the second is cut by a limit, the third is still going when the recording ends.
DATA = recorded([1, 2, 3, 10, 20, 5, 6], terminated=[2], truncated=[4])


def test_what_is_still_to_come_stops_at_both_kinds_of_end():
    np.testing.assert_array_equal(DATA.to_go, [6, 5, 3, 30, 20, 11, 6])
    np.testing.assert_array_equal(DATA.returns, [6, 6, 6, 30, 30, 11, 11])
    np.testing.assert_array_equal(DATA.step, [0, 1, 2, 0, 1, 0, 1])
    np.testing.assert_array_equal(DATA.left, [2, 1, 0, 1, 0, 1, 0])


def test_the_last_episode_is_kept_and_counts_as_cut():
    assert DATA.size == 7
    np.testing.assert_array_equal(DATA.transitions.truncated, [0, 0, 0, 0, 1, 0, 1])
    np.testing.assert_array_equal(DATA.transitions.terminated, [0, 0, 1, 0, 0, 0, 0])
    whole = recorded([1, 2], terminated=[1], truncated=[])  # an end of its own is not made another
    np.testing.assert_array_equal(whole.transitions.truncated, [0, 0])


def test_long_sums_of_small_rewards_lose_nothing():
    data = recorded([1e4] + [1e-3] * 20_000, terminated=[0], truncated=[])
    np.testing.assert_allclose(data.to_go[1], 20.0, rtol=1e-6)
    np.testing.assert_allclose(data.to_go[-1], 1e-3, rtol=1e-6)


def test_statistics_are_those_of_all_observations():
    stats = DATA.observation_stats
    assert stats.count == 7
    np.testing.assert_allclose(stats.mean, [3.0])
    np.testing.assert_allclose(stats.m2 / stats.count, [4.0])


@pytest.mark.parametrize(
    ("share", "rows"), [(0.01, {3, 4}), (1 / 3, {3, 4}), (0.5, {3, 4, 5, 6}), (2 / 3, {3, 4, 5, 6}), (1.0, set(range(7)))]
)
def test_the_best_episodes_are_drawn_whole(share, rows):
    among = jit(among_best)(DATA, share)
    assert set(DATA.best_first[: int(among)].tolist()) == rows
    batch = jit(sample)(DATA, jnp.linspace(0.0, 0.999, 200), 0.9, among)
    assert set(batch.index.tolist()) == rows


def test_equal_returns_are_taken_together():
    data = recorded([1, 1, 1, 0], terminated=[0, 1, 2], truncated=[])
    assert int(among_best(data, 0.3)) == 3


def test_a_step_is_drawn_with_what_it_led_to():
    batch = jit(sample)(DATA, jnp.asarray([0.0, 2.5 / 7, 4.5 / 7, 0.9999999]), 0.9)
    np.testing.assert_array_equal(batch.index, [0, 2, 4, 6])
    np.testing.assert_allclose(batch.bootstrap, [0.9, 0.0, 0.9, 0.9])  # only a termination has no value after it
    np.testing.assert_array_equal(batch.returns, [1, 3, 20, 6])
    np.testing.assert_array_equal(batch.next_observation[:, 0], [1, 3, 5, 7])
    np.testing.assert_allclose(replay.targets(batch, jnp.full(4, 10.0)), [10, 3, 29, 15])
