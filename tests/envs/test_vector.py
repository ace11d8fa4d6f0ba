import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.envs import Box, Discrete, TimeLimit, group, restart, transition, vectorize

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
N, T = 6, 40


class Episodes:
    """Each episode draws its length, 1 to 4, and how it ends: all of it is in the observation, beside a noise per step.

    Observations are ``[start, length, terminates, steps, noise]``; the reward of step k is ``start + k``.
    """

    observation_space, action_space = Box(-1.0, 5.0, (5,)), Discrete(2)

    def reset(self, key):
        start, length, ending = jax.random.uniform(key, (3,))
        state = jnp.stack([start, 1.0 + jnp.floor(4.0 * length), jnp.round(ending), 0.0, -1.0])
        return state, restart(state, self.mask(state))

    def step(self, key, state, action):
        state = state.at[3].add(1.0).at[4].set(jax.random.uniform(key))
        last = state[3] >= state[1]
        terminates = state[2] > 0
        return state, transition(state, state[0] + state[3], last & terminates, last & ~terminates, self.mask(state))

    @staticmethod
    def mask(state):
        return jnp.stack([state[3] == 0, state[3] > 0])


@functools.cache
def compiled(env, steps):
    @jit
    def run(key):
        state, first = env.reset(key)
        action = jnp.zeros((env.num_envs, *env.action_space.shape), env.action_space.dtype)
        _, timesteps = jax.lax.scan(lambda state, key: env.step(key, state, action), state, jax.random.split(key, steps))
        return first, timesteps, None if state.pool is None else state.pool[1]

    return run


def rollout(env, seed=0, steps=T):
    """Numpy ``(first time step [N], time steps [T, N], pool of first time steps or None)``."""
    return jax.tree.map(np.asarray, compiled(env, steps)(jax.random.key(seed)))


FRESH, POOL = vectorize(Episodes(), N), vectorize(Episodes(), N, 5)


@pytest.fixture(scope="module", params=[FRESH, POOL], ids=["fresh", "pool"])
def played(request):
    return rollout(request.param)


def episodes(played):
    """Plain-Python bookkeeping: ``(copy, last step, observations of the episode, its first one included)`` of each one."""
    first, steps, _ = played
    for b in range(N):
        seen = [first.observation[b]]
        for t in range(T):
            seen.append(steps.next_observation[t, b])
            if seen[-1][3] == seen[0][1]:
                yield b, t, np.array(seen)
                seen = [steps.observation[t, b]]


def test_the_terminal_observation_is_kept(played):
    _, steps, _ = played
    ended = steps.terminated | steps.truncated
    np.testing.assert_array_equal(steps.next_observation[ended][:, 3], steps.next_observation[ended][:, 1])
    np.testing.assert_array_equal(steps.observation[ended][:, 3:], np.broadcast_to([0.0, -1.0], (ended.sum(), 2)))
    np.testing.assert_array_equal(steps.observation[~ended], steps.next_observation[~ended])


def test_episodes_run_their_course(played):
    _, steps, _ = played
    ends = np.zeros((T, N), bool)
    for b, t, seen in episodes(played):
        start, length, terminates = seen[0][:3]
        ends[t, b] = True
        np.testing.assert_array_equal(seen[:, 3], np.arange(length + 1))
        np.testing.assert_array_equal(seen[:, :3], np.tile(seen[0][:3], (int(length) + 1, 1)))
        rewards = steps.reward[t - int(length) + 1 : t + 1, b]
        np.testing.assert_allclose(rewards, start + np.arange(1, length + 1), rtol=1e-6)
        assert (steps.terminated[t, b], steps.truncated[t, b]) == (terminates, not terminates)
    np.testing.assert_array_equal(steps.terminated | steps.truncated, ends)
    assert steps.terminated.any()
    assert steps.truncated.any()
    assert ends.sum() > 2 * N


def test_every_finished_episode_is_counted_once(played):
    _, steps, _ = played
    ended = steps.terminated | steps.truncated
    counted = {(b, t): (steps.info["episode_return"][t, b], steps.info["episode_length"][t, b]) for t, b in np.argwhere(ended)}
    expected = {(b, t): seen[0] for b, t, seen in episodes(played)}
    assert counted.keys() == expected.keys()
    for episode, (start, length, *_) in expected.items():
        assert counted[episode][1] == length
        assert counted[episode][0] == pytest.approx(length * start + length * (length + 1) / 2, rel=1e-5)


def test_statistics_run_along_with_the_episode(played):
    first, steps, _ = played
    np.testing.assert_array_equal(first.info["episode_length"], np.zeros(N))
    np.testing.assert_array_equal(first.info["episode_return"], np.zeros(N))
    np.testing.assert_array_equal(steps.info["episode_length"], steps.next_observation[..., 3])
    assert steps.info["episode_length"].dtype == np.int32


def test_the_mask_is_that_of_the_observation(played):
    first, steps, _ = played
    assert first.action_mask[:, 0].all()
    np.testing.assert_array_equal(steps.action_mask[..., 0], steps.observation[..., 3] == 0)


class Lights:
    """Three steps to an episode; the one legal action is the number of steps so far."""

    observation_space, action_space = Box(0.0, 3.0, ()), Discrete(4)

    def reset(self, key):
        return jnp.int32(0), restart(jnp.float32(0.0), jnp.arange(4) == 0)

    def step(self, key, state, action):
        steps = state + 1
        return steps, transition(steps.astype(jnp.float32), 1.0, steps == 3, False, jnp.arange(4) == steps)


def test_the_next_mask_is_that_before_a_reset():
    first, steps, _ = rollout(vectorize(Lights(), 2), steps=7)
    np.testing.assert_array_equal(first.next_action_mask, first.action_mask)
    for copy in range(2):
        assert steps.action_mask[:, copy].argmax(1).tolist() == [1, 2, 0, 1, 2, 0, 1]
        assert steps.next_action_mask[:, copy].argmax(1).tolist() == [1, 2, 3, 1, 2, 3, 1]
    np.testing.assert_array_equal(steps.next_action_mask.sum(-1), 1)
    np.testing.assert_array_equal(steps.next_action_mask.argmax(-1), steps.next_observation)


def test_without_a_mask_there_is_no_next_mask():
    first, steps, _ = rollout(vectorize(Forever(), 1), steps=7)
    assert first.next_action_mask is None
    assert steps.next_action_mask is None


def test_successive_episodes_start_differently():
    starts = [seen[0][0] for _, _, seen in episodes(rollout(FRESH))]
    assert len(set(starts)) == len(starts) > 3 * N


def test_pool_resets_come_from_the_pool_and_vary():
    first, steps, pool = rollout(POOL)
    pool = pool.observation
    assert pool.shape == (5, 5)
    assert len(set(pool[:, 0])) == 5
    starts = np.concatenate([first.observation, steps.observation[steps.terminated | steps.truncated]])
    matches = (starts[:, None] == pool).all(-1)
    np.testing.assert_array_equal(matches.sum(1), 1)
    assert matches.any(0).all()  # all of them are used
    per_copy = [{seen[0][0] for b, _, seen in episodes(rollout(POOL)) if b == copy} for copy in range(N)]
    assert min(map(len, per_copy)) > 1


@pytest.mark.parametrize("reset_pool", [0, 50])
def test_group_members_share_the_start_and_go_their_own_ways(reset_pool):
    first, steps, _ = rollout(group(Episodes(), 3, 2, reset_pool))
    starts = first.observation.reshape(3, 2, 5)
    np.testing.assert_array_equal(starts, np.broadcast_to(starts[:, :1], starts.shape))
    assert len(set(starts[:, 0, 0])) > 1
    noise = steps.next_observation[..., 4]
    assert len(np.unique(noise)) == noise.size
    # Members end together here, and so start together each time.
    later = steps.observation[..., 0].reshape(T, 3, 2)
    np.testing.assert_array_equal(later, np.broadcast_to(later[..., :1], later.shape))
    assert len(np.unique(later)) > 10


@pytest.mark.parametrize("env", [FRESH, group(Episodes(), 3, 2, 5)], ids=["fresh", "group and pool"])
def test_drawn_steps_counted_afterwards_are_plain_steps(env):
    """Step by step, or all randomness drawn at once and the episodes counted after the loop."""

    def compare(key):
        start, _ = env.reset(key)
        action = jnp.zeros(N, jnp.int32)
        draws = env.draw(key, T)
        bare_state, bare = jax.lax.scan(lambda state, draw: env.step_drawn(draw, state, action), start, draws)
        counted = env.count_episodes(bare_state, bare)

        def plain_step(state, draw):
            state, timestep = env.step_drawn(draw, state, action)
            state, timesteps = env.count_episodes(state, jax.tree.map(lambda x: x[None], timestep))
            return state, jax.tree.map(lambda x: x[0], timesteps)

        one_step = env.step(key, start, action)
        drawn_step = plain_step(start, jax.tree.map(lambda x: x[0], env.draw(key, 1)))
        return (counted, one_step), (jax.lax.scan(plain_step, start, draws), drawn_step)

    a, b = jit(compare)(jax.random.key(1))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_drawn_steps_use_a_key_and_a_start_once():
    draw = jit(lambda key: FRESH.draw(key, T))(jax.random.key(2))
    keys = np.asarray(jax.random.key_data(draw.keys)).reshape(T * N, -1)
    assert len(np.unique(keys, axis=0)) == T * N
    assert len(np.unique(draw.start[1].observation[..., 0])) == T * N


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_starts_are_those_of_their_keys(num_steps):
    """However they are drawn, in halves and with a step left over."""
    keys = jax.random.split(jax.random.key(0), (num_steps, N))
    expected = jax.vmap(jax.vmap(FRESH.env.reset))(keys)
    for x, y in zip(jax.tree.leaves(jit(FRESH._starts)(keys)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_rollout_depends_on_nothing_but_the_key():
    a, b, c = rollout(FRESH)[1], rollout(FRESH)[1], rollout(FRESH, 1)[1]
    np.testing.assert_array_equal(a.observation, b.observation)
    assert np.abs(a.observation[..., 0] - c.observation[..., 0]).max() > 0.1


class Forever:
    """Goes on for ever, or to ``end`` or ``cut``; its state holds a typed key and its observation is its number of steps."""

    observation_space, action_space = Box(0.0, 1e3, ()), Box(-1.0, 1.0, (2,))
    reset_pool = 7

    def __init__(self, end=1000, cut=1000):
        self.end, self.cut = end, cut

    def reset(self, key):
        return (key, jnp.int32(0)), restart(jnp.float32(0.0))

    def step(self, key, state, action):
        steps = state[1] + 1
        return (state[0], steps), transition(steps.astype(jnp.float32), 1.0, steps >= self.end, steps == self.cut)


def flags(env, steps=7):
    """How each step of the first copy ends."""
    timesteps = rollout(env, steps=steps)[1]
    codes = timesteps.terminated[:, 0] + 2 * timesteps.truncated[:, 0]
    return [("", "terminated", "truncated", "both")[code] for code in codes]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TimeLimit(Forever(), 3), ["", "", "truncated"] * 2 + [""]),
        (TimeLimit(Forever(end=3), 3), ["", "", "terminated"] * 2 + [""]),  # at the very last step
        (TimeLimit(Forever(end=2), 3), ["", "terminated"] * 3 + [""]),  # and the count begins anew
        (TimeLimit(Forever(cut=2), 3), ["", "truncated"] * 3 + [""]),
        (TimeLimit(TimeLimit(Forever(), 2), 3), ["", "truncated"] * 3 + [""]),
        (TimeLimit(TimeLimit(Forever(), 3), 2), ["", "truncated"] * 3 + [""]),
    ],
)
def test_time_limits(env, expected):
    assert flags(vectorize(env, 1)) == expected


def test_a_time_limit_changes_nothing_else():
    env = TimeLimit(Forever(), 3)
    assert (env.observation_space, env.action_space) == (Forever.observation_space, Forever.action_space)
    _, steps, _ = rollout(vectorize(env, 1), steps=4)
    np.testing.assert_array_equal(steps.next_observation[:, 0], [1, 2, 3, 1])
    np.testing.assert_array_equal(steps.observation[:, 0], [1, 2, 0, 1])
    np.testing.assert_array_equal(steps.reward[:, 0], 1.0)


def test_a_time_limit_may_be_traced():
    def first_cut(limit):
        env = TimeLimit(Forever(), limit)
        state, _ = env.reset(jax.random.key(0))
        scan = jax.lax.scan(lambda state, _: env.step(jax.random.key(0), state, jnp.zeros(2)), state, None, length=9)
        return jnp.argmax(scan[1].truncated) + 1

    np.testing.assert_array_equal(jit(jax.vmap(first_cut))(jnp.array([2, 5, 9])), [2, 5, 9])


def test_the_environment_may_ask_for_a_pool():
    def pool_of(env, *arguments):
        state, _ = jax.eval_shape(vectorize(env, 2, *arguments).reset, jax.random.key(0))
        return None if state.pool is None else state.pool[1].reward.shape[0]

    assert pool_of(Forever()) == 7
    assert pool_of(TimeLimit(Forever(), 3)) == 7
    assert pool_of(Forever(), 0) is None
    assert pool_of(Forever(), 4) == 4
    assert pool_of(Episodes()) is None


def test_a_state_may_hold_typed_keys():
    for env in (vectorize(Forever(end=2), 4, 0), group(Forever(end=2), 2, 2, 0), group(Forever(end=2), 2, 2, 3)):
        assert flags(env, 4) == ["", "terminated"] * 2


@pytest.mark.parametrize(("sizes", "name"), [((0, 1), "num_envs"), ((2, 0), "group_size")])
def test_sizes_below_one_raise(sizes, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        group(Episodes(), *sizes)
