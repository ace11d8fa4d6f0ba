import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.ops import replay
from rljax.ops.replay import Transition

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
property_test = settings(deadline=None, max_examples=25, derandomize=True)
sample = jit(replay.sample, static_argnums=3)
prioritize = jit(replay.prioritize)
importance_weights = jit(replay.importance_weights)
BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1
NO = np.zeros((12, 2), bool)


def steps(terminated=NO, truncated=NO, rewards=None) -> Any:
    """Transitions ``[T, N]``: all of them differ, step t of column c observes ``100 c + t`` and leads to a half more."""
    t, c = np.indices(terminated.shape)
    observation = (100 * c + t).astype(np.float32)
    arrays: dict[str, Any] = dict(
        observation=observation,
        action_mask=np.stack([t % 2 == 0, t % 2 == 1], -1),
        action=(10 * t + c).astype(np.int32),
        reward=(observation + 1 if rewards is None else rewards).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        next_observation=observation + 0.5,
        next_action_mask=np.stack([t % 3 == 0, t % 3 > 0], -1),
    )
    return Transition(**arrays)


def adds(transitions, capacity, n_step):
    """The buffers after each of the adds, ``[T, ...]``."""

    def add(buffer, row):
        buffer = replay.add(buffer, row, n_step)
        return buffer, buffer

    example = jax.tree.map(lambda x: x[0], transitions)
    return jax.lax.scan(add, replay.init(example, capacity, prioritized=True), transitions)[1]


history = jit(adds, static_argnums=(1, 2))


def at(tree, t):
    return jax.tree.map(lambda x: np.asarray(x)[t], tree)


def filled(num_adds, n_step=1, transitions=None, capacity=10):
    """A prioritised ring of five rows of two after ``num_adds`` adds."""
    return at(history(steps() if transitions is None else transitions, capacity, n_step), num_adds - 1)


def uniform(buffer):
    return buffer.replace(priorities=None)


def grid(starts, num_envs=2, size=10):
    """Uniforms that hit every start and environment once, in order, and zeros up to ``size``."""
    row, column = np.indices((starts, num_envs)).reshape(2, -1)
    hits = np.stack([(row + 0.5) / starts, (column + 0.5) / num_envs], -1)
    return np.concatenate([hits, np.zeros((size - len(hits), 2))]).astype(np.float32)


def draw_all(buffer, starts, n_step, discount=0.5):
    """Every entry that starts a window, the oldest first."""
    return at(sample(uniform(buffer), grid(starts), discount, n_step), slice(2 * starts))


def assert_equal_trees(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# The ring


def test_the_ring_overwrites_the_oldest():
    buffers = history(steps(), 11, 1)  # five rows of two, and one entry that fits no row
    np.testing.assert_array_equal(buffers.filled[:7], [1, 2, 3, 4, 5, 5, 5])
    np.testing.assert_array_equal(buffers.row[:7], [1, 2, 3, 4, 0, 1, 2])
    assert_equal_trees(at(buffers.transitions, 6), at(steps(), np.array([5, 6, 2, 3, 4])))


def test_arrays_keep_their_dtype_and_observations_their_structure():
    images = np.random.default_rng(0).integers(0, 256, (12, 2, 3, 3), np.uint8)
    transitions = steps()
    observation = {"image": images, "speed": transitions.observation}
    transitions = transitions.replace(observation=observation, action_mask=None, next_action_mask=None)
    batch = draw_all(filled(5, 1, transitions), 5, 1)
    assert batch.start.action_mask is None
    assert batch.next_action_mask is None
    dtypes = (batch.start.observation["image"].dtype, batch.start.action.dtype, batch.index.dtype, batch.returns.dtype)
    assert dtypes == (np.uint8, np.int32, np.int32, np.float32)
    np.testing.assert_array_equal(batch.start.observation["image"], images[:5].reshape(10, 3, 3))
    np.testing.assert_array_equal(batch.start.observation["speed"], steps().observation[:5].reshape(10))


def test_a_buffer_of_less_than_one_row_names_the_key():
    with pytest.raises(ValueError, match=r"algo\.buffer_size \(1\) .* all 2 environments"):
        replay.init(at(steps(), 0), 1)


# Uniform draws


@pytest.mark.parametrize(("num_adds", "legal"), [(4, [0, 1]), (5, [0, 1, 2]), (7, [2, 3, 4]), (8, [3, 4, 0])])
def test_uniform_draws_hit_every_full_window_equally_often(num_adds, legal):
    # Windows of three steps: the two newest rows start none. After 7 adds they are rows 0 and 1, after 8 rows 1 and 2.
    uniforms = jax.random.uniform(jax.random.key(num_adds), (20_000, 2))
    batch = sample(uniform(filled(num_adds, 3)), uniforms, 0.5, 3)
    counts = np.bincount(batch.index, minlength=10).reshape(5, 2)
    assert set(np.flatnonzero(counts.any(1))) == set(legal)
    assert scipy.stats.chisquare(counts[legal].ravel()).pvalue > 1e-3
    np.testing.assert_allclose(batch.probability, 0.5 / len(legal), rtol=1e-6)


def test_the_ends_of_the_unit_interval_are_the_oldest_and_the_newest_window():
    uniforms = np.repeat(np.array([[0.0], [BELOW_ONE]], np.float32), 5, 0).repeat(2, 1)
    batch = sample(uniform(filled(8, 3)), uniforms, 0.5, 3)  # holds the steps 3 to 7
    np.testing.assert_array_equal(batch.start.observation, [3] * 5 + [105] * 5)


# Returns over n steps


@pytest.mark.parametrize(
    ("terminated", "truncated", "returns", "bootstrap", "last"),
    [
        ([], [], 3.0, 0.125, 2),
        ([1], [], 2.0, 0.0, 1),
        ([], [1], 2.0, 0.25, 1),  # a cut state has a value: the one before the reset
        ([1], [1], 2.0, 0.0, 1),  # a terminal state has none, limit or not
        ([0], [], 1.0, 0.0, 0),
        ([], [0], 1.0, 0.5, 0),
        ([2], [], 3.0, 0.0, 2),
        ([], [2], 3.0, 0.125, 2),
        ([1], [0], 1.0, 0.5, 0),  # what ends later is another episode
        ([2], [1], 2.0, 0.25, 1),
        ([1, 2], [], 2.0, 0.0, 1),
        ([3], [3], 3.0, 0.125, 2),  # after the window
    ],
)
def test_three_step_returns_by_hand(terminated, truncated, returns, bootstrap, last):
    flags, rewards = np.zeros((2, 12, 2), bool), np.zeros((12, 2))
    flags[0, terminated, 0] = flags[1, truncated, 0] = True
    rewards[:4, 0], rewards[2, 1] = [1.0, 2.0, 4.0, 8.0], 16.0
    transitions = steps(*flags, rewards=rewards)
    batch = at(draw_all(filled(4, 3, transitions), 2, 3, 0.5), slice(2))  # those that start with step 0
    np.testing.assert_array_equal(batch.returns, [returns, 4.0])  # the other column's flags are its own
    np.testing.assert_array_equal(batch.bootstrap, [bootstrap, 0.125])
    np.testing.assert_array_equal(batch.next_observation, [last + 0.5, 102.5])
    np.testing.assert_array_equal(batch.next_action_mask[0], [last % 3 == 0, last % 3 > 0])
    assert_equal_trees(batch.start, at(transitions, 0))


def test_a_window_wraps_around_the_end_of_the_ring():
    buffer = filled(7, 3)
    np.testing.assert_array_equal(buffer.transitions.observation[:, 0], [5, 6, 2, 3, 4])
    batch = draw_all(buffer, 3, 3)
    np.testing.assert_array_equal(batch.index, np.arange(4, 10))
    np.testing.assert_array_equal(batch.start.observation, [2, 102, 3, 103, 4, 104])
    np.testing.assert_array_equal(batch.returns[::2], [3 + 4 / 2 + 5 / 4, 4 + 5 / 2 + 6 / 4, 5 + 6 / 2 + 7 / 4])
    np.testing.assert_array_equal(batch.next_observation, [4.5, 104.5, 5.5, 105.5, 6.5, 106.5])


@pytest.mark.parametrize(("discount", "returns", "bootstrap"), [(0.0, 1.0, 0.0), (1.0, 6.0, 1.0)])
def test_discounts_of_zero_and_one(discount, returns, bootstrap):
    batch = draw_all(filled(4, 3), 2, 3, discount)
    assert (batch.returns[0], batch.bootstrap[0]) == (returns, bootstrap)


def test_nan_of_the_next_episode_is_not_looked_at():
    truncated, rewards = NO.copy(), np.ones((12, 2))
    truncated[1], rewards[2:] = True, np.nan
    assert draw_all(filled(4, 3, steps(NO, truncated, rewards)), 2, 3).returns[0] == 1.5


# Against lists of transitions


def windows(transitions, num_adds, rows, n_step, discount):
    """What can be drawn after so many adds: ``{(step, column): (returns, bootstrap, last step)}``, in plain Python."""
    result = {}
    for start in range(max(0, num_adds - rows), num_adds - n_step + 1):
        for column in range(2):
            returns = 0.0
            for k, t in enumerate(range(start, start + n_step)):
                returns += discount**k * float(transitions.reward[t, column])
                if transitions.terminated[t, column] or transitions.truncated[t, column]:
                    break
            result[start, column] = (returns, 0.0 if transitions.terminated[t, column] else discount ** (k + 1), t)
    return result


@functools.partial(jit, static_argnums=(3, 4))
def draw_after_each_add(transitions, uniforms, discount, rows, n_step):
    buffers = adds(transitions, 2 * rows, n_step)
    return jax.vmap(lambda b, u: replay.sample(uniform(b), u, discount, n_step))(buffers, uniforms), buffers.priorities


@property_test
@given(
    st.integers(0, 2**31),
    st.sampled_from([(1, 1), (5, 2), (3, 3), (6, 4)]),  # rows of the ring and steps of a window
    st.sampled_from([0.0, 0.2, 0.6]),
    st.floats(0, 1, width=32),
)
def test_any_number_of_adds_matches_lists_of_transitions(seed, sizes, flag_rate, discount):
    rows, n_step = sizes
    rng = np.random.default_rng(seed)
    transitions = steps(*(rng.random((2, 12, 2)) < flag_rate), rewards=rng.normal(size=(12, 2)))
    expected = [windows(transitions, num_adds, rows, n_step, discount) for num_adds in range(1, 13)]
    uniforms = np.stack([grid(len(drawable) // 2, 2, 2 * rows) for drawable in expected])
    batches, priorities = jax.tree.map(np.asarray, draw_after_each_add(transitions, uniforms, discount, rows, n_step))
    weights = priorities.weights
    for t, drawable in enumerate(expected):
        index = [start % rows * 2 + column for start, column in drawable]
        # The same entries are drawable by priority.
        np.testing.assert_array_equal(np.flatnonzero(weights[t]), np.sort(index))
        if drawable:
            batch = at(batches, (t, slice(len(drawable))))
            start, column = np.array(list(drawable)).T
            returns, bootstrap, last = map(np.array, zip(*drawable.values(), strict=True))
            np.testing.assert_array_equal(batch.index, index)  # each of them once, the oldest first
            assert_equal_trees(batch.start, at(transitions, (start, column)))
            np.testing.assert_allclose(batch.returns, returns, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.bootstrap, bootstrap, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(batch.next_observation, transitions.next_observation[last, column])
            np.testing.assert_array_equal(batch.next_action_mask, transitions.next_action_mask[last, column])
            np.testing.assert_allclose(batch.probability, 1 / len(drawable), rtol=1e-6)
    np.testing.assert_array_equal(priorities.sums, weights.sum(2))


# Priorities


def weights_of(buffer):
    """``[R, N]``; the tree may hold a few more, which are always 0."""
    flat = np.asarray(buffer.priorities.weights).ravel()
    shape = buffer.transitions.reward.shape
    np.testing.assert_array_equal(flat[np.prod(shape) :], 0.0)
    np.testing.assert_allclose(buffer.priorities.sums, np.asarray(buffer.priorities.weights).sum(1), rtol=1e-6)
    return flat[: np.prod(shape)].reshape(shape)


def set_priorities(buffer, index, priorities, exponent):
    return prioritize(buffer, np.asarray(index, np.int32), np.asarray(priorities, np.float32), exponent)


def test_entries_without_a_full_window_weigh_nothing():
    # The two newest rows never do, before the ring is full and after it wraps.
    for num_adds, legal in enumerate([[], [], [0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0], [4, 0, 1]], 1):
        expected = [[float(row in legal)] * 2 for row in range(5)]
        np.testing.assert_array_equal(weights_of(filled(num_adds, 3)), expected)


def test_new_entries_get_the_highest_weight_given_so_far():
    buffer = filled(3)
    np.testing.assert_array_equal(weights_of(buffer), [[1, 1], [1, 1], [1, 1], [0, 0], [0, 0]])
    buffer = set_priorities(buffer, [0, 3, 4], [16.0, 0.25, 4.0], 0.5)
    np.testing.assert_array_equal(weights_of(buffer), [[4, 1], [1, 0.5], [2, 1], [0, 0], [0, 0]])
    buffer = set_priorities(buffer, [0, 3, 4], [0.25, 0.25, 0.25], 0.5)  # no entry weighs 4 any more
    add = jit(replay.add)
    for t in (3, 4, 5):
        buffer = add(buffer, at(steps(), t))
    np.testing.assert_array_equal(weights_of(buffer), [[4, 4], [1, 0.5], [0.5, 1], [4, 4], [4, 4]])


def test_priorities_of_entries_without_a_window_stay_zero():
    # Drawn before the adds that overwrote them: after 7 adds rows 0 and 1 are the newest of five.
    buffer = set_priorities(filled(7, 3), [0, 3, 6], [9.0, 9.0, 5.0], 1.0)
    np.testing.assert_array_equal(weights_of(buffer), [[0, 0], [0, 0], [1, 1], [5, 1], [1, 1]])
    assert buffer.priorities.highest == 5.0
    buffer = set_priorities(filled(2), [8, 4, 0], [9.0, 9.0, 5.0], 1.0)  # nothing was written there yet
    np.testing.assert_array_equal(weights_of(buffer), [[5, 1], [1, 1], [0, 0], [0, 0], [0, 0]])


def test_an_entry_may_be_in_a_batch_twice():
    buffer = set_priorities(filled(5), [5, 2, 5], [3.0, 2.0, 3.0], 1.0)
    np.testing.assert_array_equal(weights_of(buffer), [[1, 1], [2, 1], [1, 3], [1, 1], [1, 1]])


def test_without_priorities_there_is_nothing_to_set():
    buffer = uniform(filled(5))
    assert replay.prioritize(buffer, jnp.array([0]), jnp.array([2.0]), 1.0) is buffer


@functools.cache
def prioritized():
    """After 8 adds of windows of three steps: rows 1 and 2 start none, and every other weight is its own."""
    return set_priorities(filled(8, 3), np.arange(10), np.random.default_rng(1).uniform(0.2, 2.0, 10), 0.7)


def exact(buffer):
    weights = np.float64(weights_of(buffer).ravel())
    return weights / weights.sum()


@functools.partial(jit, static_argnums=2)
def draw_ones(buffer, uniforms, n_step):
    """Batches of one: those of a larger batch come from separate strata and are not independent."""
    batch = jax.vmap(lambda u: replay.sample(buffer, jnp.stack([u, u])[None], 0.5, n_step))(uniforms)
    return batch.index[:, 0], batch.probability[:, 0]


def test_prioritized_frequencies_and_probabilities():
    index, probability = draw_ones(prioritized(), jax.random.uniform(jax.random.key(2), (20_000,)), 3)
    counts, expected = np.bincount(index, minlength=10), exact(prioritized())
    np.testing.assert_array_equal(np.flatnonzero(counts == 0), [2, 3, 4, 5])
    drawable = expected > 0
    assert scipy.stats.chisquare(counts[drawable], 20_000 * expected[drawable]).pvalue > 1e-3
    np.testing.assert_allclose(probability, expected[index], rtol=1e-6)


def test_a_batch_draws_once_from_each_of_its_strata():
    uniforms, upto = jax.random.uniform(jax.random.key(3), (200, 10, 2)), np.cumsum(exact(prioritized()))
    batch = jit(jax.vmap(lambda u: replay.sample(prioritized(), u, 0.5, 3)))(uniforms)
    targets = (np.arange(10) + np.float64(uniforms[..., 0])) / 10
    np.testing.assert_array_equal(batch.index, np.searchsorted(upto, targets, side="right"))


@pytest.mark.parametrize("value", [0.0, 0.5, BELOW_ONE])
def test_with_equal_weights_and_as_many_draws_each_entry_comes_once(value):
    batch = sample(filled(5), np.full((10, 2), value, np.float32), 0.5, 1)
    # A hair below 1, float32 rounds up to the next stratum; the last one has no next.
    counts = np.bincount(batch.index, minlength=10)
    assert counts.sum() == 10
    assert batch.index[-1] == 9
    if value < 0.9:
        np.testing.assert_array_equal(counts, 1)


def test_prioritized_windows_are_the_uniform_ones():
    by_priority = sample(prioritized(), jax.random.uniform(jax.random.key(4), (10, 2)), 0.5, 3)
    expected = draw_all(prioritized(), 3, 3)
    where = [list(expected.index).index(i) for i in by_priority.index]
    assert_equal_trees(by_priority.replace(probability=None), at(expected.replace(probability=None), np.array(where)))


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_entries_of_weight_zero_are_never_drawn(rate):
    """Zeros at both ends of each block of the tree, whole blocks, and some elsewhere; draws within rounding of every border."""
    rng, size = np.random.default_rng(4), 590
    example = at(steps(np.zeros((1, size), bool), np.zeros((1, size), bool)), 0)

    @jit
    def make(priorities):
        buffer = replay.add(replay.init(example, size, prioritized=True), example)
        return replay.prioritize(buffer, jnp.arange(size), priorities, 1.0)

    width, index = 25, np.arange(size)
    is_zero = (index % width == 0) | (index % width == width - 1) | (index // width % 4 == 1) | (rng.random(size) < rate)
    buffer = make(np.where(is_zero, 0.0, rng.random(size) ** 3).astype(np.float32))
    assert buffer.priorities.weights.shape[1] == width
    near_borders = np.cumsum(exact(buffer)) * (1 + 2.0**-24 * np.arange(-8, 9)[:, None])
    uniforms = np.concatenate([near_borders.ravel(), 1 - 2.0**-24 * np.arange(100), [0.0]])
    drawn, probability = draw_ones(buffer, np.clip(uniforms, 0.0, BELOW_ONE).astype(np.float32), 1)
    np.testing.assert_array_equal(np.unique(drawn[is_zero[drawn]]), [])
    assert probability.min() > 0


def test_importance_weights_by_hand():
    # Weights of 4, 2, 1 and 1: 1 / (size * probability) is 1/2, 1, 2, 2, and the largest of the batch becomes 1.
    buffer = set_priorities(filled(2), [0, 1, 2], [4.0, 2.0, 1.0], 1.0)
    batch = sample(buffer, np.full((10, 2), 0.05, np.float32), 0.5, 1)
    np.testing.assert_array_equal(batch.index, [0, 0, 0, 0, 0, 1, 1, 1, 2, 3])
    np.testing.assert_array_equal(batch.probability, [0.5] * 5 + [0.25] * 3 + [0.125] * 2)
    for exponent in (0.0, 0.5, 1.0):
        expected = np.array([0.25] * 5 + [0.5] * 3 + [1.0] * 2) ** exponent
        np.testing.assert_allclose(importance_weights(batch, buffer, exponent), expected, rtol=1e-6)
    of_first = at(batch, slice(5))
    np.testing.assert_array_equal(replay.importance_weights(of_first, buffer, 1.0), np.ones(5))


def test_importance_weights_of_uniform_draws_are_one():
    batch = draw_all(filled(5), 5, 1)
    np.testing.assert_array_equal(importance_weights(batch, uniform(filled(5)), 0.7), np.ones(10))


# Lanes and copies


def one_step(buffer, row, uniforms):
    """What an agent does with it: an add, a draw, and new priorities that depend on the draw."""
    buffer = replay.add(buffer, row, 3)
    batch = replay.sample(buffer, uniforms, 0.5, 3)
    weights = replay.importance_weights(batch, buffer, 0.4)
    return replay.prioritize(buffer, batch.index, jnp.abs(batch.returns) + 0.1, 0.6), batch, weights


one_lane, lanes = jit(one_step), jit(jax.vmap(one_step))


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_lanes_under_vmap_are_separate_buffers(kind):
    rng = np.random.default_rng(5)
    transitions = [steps(*(rng.random((2, 12, 2)) < 0.3), rewards=rng.normal(size=(12, 2))) for _ in range(2)]
    buffers = [filled(num_adds, 3, x) for num_adds, x in zip((4, 9), transitions, strict=True)]  # one of them has wrapped
    buffers = [uniform(x) if kind == "uniform" else x for x in buffers]
    arguments = (buffers, [at(x, 9) for x in transitions], list(jax.random.uniform(jax.random.key(6), (2, 10, 2))))
    result = lanes(*(jax.tree.map(lambda *x: jnp.stack(x), *pair) for pair in arguments))
    for lane in range(2):
        expected = one_lane(*(x[lane] for x in arguments))
        for a, b in zip(jax.tree.leaves(at(result, lane)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_buffer_is_nothing_but_numbers(kind):
    buffer = uniform(filled(8, 3)) if kind == "uniform" else prioritized()
    restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), buffer)
    for t, key in enumerate(jax.random.split(jax.random.key(7), 4)):
        uniforms = jax.random.uniform(key, (10, 2))
        (buffer, *drawn), (restored, *again) = (one_lane(x, at(steps(), t), uniforms) for x in (buffer, restored))
        assert_equal_trees((buffer, drawn), (restored, again))


def test_types_are_stable():
    # A buffer that changed its type could not be a scan's carry.
    buffer = jax.eval_shape(lambda: replay.init(jax.tree.map(jnp.asarray, at(steps(), 0)), 10, prioritized=True))
    after, *_ = jax.eval_shape(one_step, buffer, at(steps(), 0), jnp.zeros((4, 2)))
    for a, b in zip(jax.tree.leaves(buffer), jax.tree.leaves(after), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
