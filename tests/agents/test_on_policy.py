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
def played(num_steps):
    """Numpy ``(trajectory, mask, metrics, metrics without the mask)``."""
    envs = group(Countdown(), GROUPS, SIZE)
    policy = actor_critic(Countdown.observation_space, Countdown.action_space, "mlp", (4,))
    example = jax.eval_shape(lambda: envs.reset(jax.random.key(0)))[1]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(policy.init, jax.random.key(0), example))

    @jit
    def play(key):
        trajectory, mask = first_episodes(policy, envs, params, key, num_steps)
        transitions = trajectory.transitions
        return trajectory, mask, episode_metrics(transitions, mask), episode_metrics(transitions)

    return jax.tree.map(np.asarray, play(jax.random.key(1)))


@pytest.mark.parametrize("num_steps", [3, 9])
def test_first_episodes_are_masked_after_their_end(num_steps):
    trajectory, mask, *_ = played(num_steps)
    first = trajectory.timesteps.observation[0]
    assert set(first[:, 0]) == {1, 2, 3, 4}
    np.testing.assert_array_equal(first[:, 1:], 0.0)  # from a fresh reset
    assert (mask.shape, mask.dtype) == ((num_steps, GROUPS * SIZE), bool)
    np.testing.assert_array_equal(mask, np.arange(num_steps)[:, None] < first[:, 0])  # those of length 4 are cut after 3 steps
    steps = np.broadcast_to(np.arange(1.0, num_steps + 1)[:, None], mask.shape)
    np.testing.assert_array_equal(trajectory.transitions.reward[mask], steps[mask])
    np.testing.assert_array_equal(trajectory.transitions.done.sum(0, where=mask), first[:, 0] <= num_steps)


def test_first_episodes_of_a_group_start_alike():
    trajectory, *_ = played(9)
    first = trajectory.timesteps.observation[0].reshape(GROUPS, SIZE, 3)
    np.testing.assert_array_equal(first[:, 0], first[:, 1])
    members = np.moveaxis(trajectory.transitions.next_observation.reshape(9, GROUPS, SIZE, 3), 2, 0)
    assert np.all(members[0, ..., 2] != members[1, ..., 2])  # and go their own ways
    assert np.any(trajectory.samples.reshape(9, GROUPS, SIZE)[..., 0] != trajectory.samples.reshape(9, GROUPS, SIZE)[..., 1])


@pytest.mark.parametrize("num_steps", [3, 9])
def test_metrics_of_first_episodes_count_each_environment_once(num_steps):
    trajectory, _, metrics, unmasked = played(num_steps)
    lengths = trajectory.timesteps.observation[0, :, 0]
    lengths = lengths[lengths <= num_steps]  # those that came to their end
    returns = lengths * (lengths + 1) / 2
    expected = {"return": returns, "return_square": returns**2, "length": lengths, "truncated": lengths % 2 == 0}
    assert metrics.keys() == {f"episode/{name}" for name in expected}
    for name, values in expected.items():
        assert metrics[f"episode/{name}"] == (values.sum(), len(lengths))
    assert unmasked["episode/return"][1] == trajectory.transitions.done.sum() > len(lengths)


def test_episode_metrics_by_hand():
    # Three steps of two environments: an episode of return 5 terminates, one of 3 is cut, and a state both ends and is cut.
    no = np.zeros((3, 2), bool)
    terminated, truncated, mask = no.copy(), no.copy(), ~no
    terminated[1, 0] = truncated[0, 1] = terminated[2, 1] = truncated[2, 1] = True
    mask[2] = False
    info = {
        "episode_return": jnp.array([[2.0, 3.0], [5.0, 1.0], [9.0, 4.0]]),
        "episode_length": jnp.array([[1, 1], [2, 1], [1, 2]]),
    }
    steps = restart(jnp.zeros((3, 2))).replace(terminated=terminated, truncated=truncated, info=info)
    names = ["episode/return", "episode/return_square", "episode/length", "episode/truncated"]
    metrics = episode_metrics(steps)
    assert [tuple(map(float, metrics[name])) for name in names] == [(12, 3), (50, 3), (5, 3), (1, 3)]
    metrics = episode_metrics(steps, jnp.asarray(mask))
    assert [tuple(map(float, metrics[name])) for name in names] == [(8, 2), (34, 2), (3, 2), (1, 2)]
    metrics = episode_metrics(steps, jnp.asarray(no))
    assert [tuple(map(float, metrics[name])) for name in names] == [(0, 0)] * 4
