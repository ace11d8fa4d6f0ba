import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.agents.on_policy import episode_metrics, first_episodes, shuffled_minibatches
from rljax.envs import Box, Discrete, group, restart, transition
from rljax.networks import actor_critic

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (12, 3), (512, 4), (96, 1)])
def test_every_epoch_holds_every_index_once(size, parts):
    order = np.asarray(shuffled_minibatches(jax.random.key(0), size, 5, parts)).reshape(5, size)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(size), (5, 1)))


def test_every_index_is_equally_likely_in_every_minibatch():
    order = np.asarray(shuffled_minibatches(jax.random.key(1), 8, 20_000, 4)).reshape(20_000, 4, 2)
    for index in range(8):
        share = (order == index).any(-1).mean(0)
        np.testing.assert_allclose(share, 0.25, atol=0.015)  # five standard deviations


@dataclasses.dataclass(frozen=True)
class Countdown:
    """An episode draws its length, 1 to 4: odd ones terminate, even ones are cut. Step k has reward k.

    Observations are ``[length, steps so far, noise of the step]``.
    """

    observation_space = Box(0.0, 4.0, (3,))
    action_space = Discrete(2)

    def reset(self, key):
        state = jnp.stack([jax.random.randint(key, (), 1, 5).astype(jnp.float32), 0.0, 0.0])
        return state, restart(state)

    def step(self, key, state, action):
        length, steps = state[0], state[1] + 1
        state = jnp.stack([length, steps, jax.random.uniform(key)])
        last, odd = steps == length, length % 2 == 1
        return state, transition(state, steps, last & odd, last & ~odd)


GROUPS, SIZE = 12, 2


@functools.cache
def player(num_steps):
    envs = group(Countdown(), GROUPS, SIZE)
    policy = actor_critic(Countdown.observation_space, Countdown.action_space, "mlp", (4,))
    example = jax.eval_shape(lambda: envs.reset(jax.random.key(0)))[1]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(policy.init, jax.random.key(0), example))

    def play(key):
        episodes = first_episodes(policy, envs, params, key, num_steps)
        return episodes, episodes.metrics()

    return play


@functools.cache
def played(num_steps):
    """Numpy ``(episodes, metrics)``."""
    return jax.tree.map(np.asarray, jit(player(num_steps))(jax.random.key(1)))


@pytest.mark.parametrize("num_steps", [3, 9])
def test_first_episodes_are_masked_after_their_end(num_steps):
    episodes, _ = played(num_steps)
    mask, first = episodes.mask, episodes.first.observation
    assert set(first[:, 0]) == {1, 2, 3, 4}
    np.testing.assert_array_equal(first[:, 1:], 0.0)  # from a fresh reset
    assert (mask.shape, mask.dtype) == ((num_steps, GROUPS * SIZE), bool)
    np.testing.assert_array_equal(mask, np.arange(num_steps)[:, None] < first[:, 0])  # those of length 4 are cut after 3 steps
    steps = np.broadcast_to(np.arange(1.0, num_steps + 1)[:, None], mask.shape)
    np.testing.assert_array_equal(episodes.transitions.reward[mask], steps[mask])
    np.testing.assert_array_equal(episodes.starts.observation[mask][:, 1], steps[mask] - 1)
    lengths = np.minimum(first[:, 0], num_steps)
    np.testing.assert_array_equal(episodes.last.sum(0), first[:, 0] <= num_steps)
    np.testing.assert_array_equal(episodes.returns, lengths * (lengths + 1) / 2)


def test_first_episodes_stop_when_all_have_ended_and_repeat_the_last_time_step():
    episodes, _ = played(9)
    assert not episodes.mask[4:].any()
    transitions = episodes.transitions
    for x in jax.tree.leaves((transitions.next_observation, transitions.terminated, transitions.truncated)):
        np.testing.assert_array_equal(x[4:], np.broadcast_to(x[3], x[4:].shape))
    # What an ended environment gives is never acted on: the first observation stands there, and no reward.
    after = ~episodes.mask
    first = np.broadcast_to(episodes.first.observation, episodes.starts.observation.shape)
    np.testing.assert_array_equal(episodes.starts.observation[after], first[after])
    np.testing.assert_array_equal(transitions.reward[after], 0.0)


def test_first_episodes_of_a_group_start_alike():
    episodes, _ = played(9)
    first = episodes.first.observation.reshape(GROUPS, SIZE, 3)
    np.testing.assert_array_equal(first[:, 0], first[:, 1])
    members = np.moveaxis(episodes.transitions.next_observation[:1].reshape(1, GROUPS, SIZE, 3), 2, 0)
    assert np.all(members[0, ..., 2] != members[1, ..., 2])  # and go their own ways
    samples = episodes.samples.reshape(9, GROUPS, SIZE)
    assert np.any(samples[..., 0] != samples[..., 1])


@pytest.mark.parametrize("num_steps", [3, 9])
def test_metrics_of_first_episodes_count_each_environment_once(num_steps):
    episodes, metrics = played(num_steps)
    all_lengths = episodes.first.observation[:, 0]
    lengths = all_lengths[all_lengths <= num_steps]  # those that came to their end
    returns = lengths * (lengths + 1) / 2
    expected = {"return": returns, "return_square": returns**2, "length": lengths, "truncated": lengths % 2 == 0}
    assert metrics.keys() == {*(f"episode/{name}" for name in expected), "unfinished"}
    for name, values in expected.items():
        assert metrics[f"episode/{name}"] == (values.sum(), len(lengths))
    assert metrics["unfinished"] == pytest.approx(np.mean(all_lengths > num_steps))


def test_lanes_of_first_episodes_equal_single_ones():
    """Lanes play until the last of them has ended; what a lane does meanwhile shows nowhere."""
    keys = jax.random.split(jax.random.key(3), 3)
    many, metrics = jit(jax.vmap(player(9)))(keys)
    play = jit(player(9))
    for i, key in enumerate(keys):
        one, own = play(key)
        for a, b in zip(jax.tree.leaves(metrics), jax.tree.leaves(own), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6)
        np.testing.assert_array_equal(many.mask[i], one.mask)
        np.testing.assert_array_equal(many.samples[i][one.mask], one.samples[one.mask])
        np.testing.assert_array_equal(many.timesteps.observation[i, :-1][one.mask], one.timesteps.observation[:-1][one.mask])


def test_episode_metrics_by_hand():
    # Three steps of two environments: an episode of return 5 terminates, one of 3 is cut, and a state both ends and is cut.
    no = np.zeros((3, 2), bool)
    terminated, truncated = no.copy(), no.copy()
    terminated[1, 0] = truncated[0, 1] = terminated[2, 1] = truncated[2, 1] = True
    info = {
        "episode_return": jnp.array([[2.0, 3.0], [5.0, 1.0], [9.0, 4.0]]),
        "episode_length": jnp.array([[1, 1], [2, 1], [1, 2]]),
    }
    steps = restart(jnp.zeros((3, 2))).replace(terminated=terminated, truncated=truncated, info=info)
    names = ["episode/return", "episode/return_square", "episode/length", "episode/truncated"]
    metrics = episode_metrics(steps)
    assert [tuple(map(float, metrics[name])) for name in names] == [(12, 3), (50, 3), (5, 3), (1, 3)]
    metrics = episode_metrics(steps.replace(terminated=no, truncated=no))
    assert [tuple(map(float, metrics[name])) for name in names] == [(0, 0)] * 4
