import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.ops import normalization
from rljax.ops.normalization import RunningStats, init_stats

property_test = settings(deadline=None, max_examples=30, derandomize=True)
seeds = st.integers(0, 2**31)
merge = jax.jit(normalization.merge_stats)
update = jax.jit(normalization.update_stats)
normalize = jax.jit(normalization.normalize)
whiten = jax.jit(normalization.whiten)
return_trace = jax.jit(normalization.return_trace)
explained_variance = jax.jit(normalization.explained_variance)


def plain(rows):
    """Statistics of ``rows`` ``[n, ...]`` by numpy; n may be 0."""
    if not len(rows):
        return init_stats(rows.shape[1:])
    mean = rows.mean(0, dtype=np.float64)
    m2 = np.square(rows - mean).sum(0)
    return RunningStats(*(jnp.asarray(x, jnp.float32) for x in (len(rows), mean, m2)))


def assert_same_stats(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@property_test
@given(seeds, st.lists(st.integers(0, 40), max_size=6), st.floats(-100, 100), st.floats(0.01, 100))
def test_any_split_merges_to_the_whole(seed, cuts, mean, scale):
    rows = mean + scale * np.random.default_rng(seed).normal(size=(40, 3))
    parts = np.split(rows, sorted(cuts))  # some of them empty
    merged = functools.reduce(merge, map(plain, parts))
    assert merged.count == 40
    np.testing.assert_allclose(merged.mean, rows.mean(0), rtol=1e-4, atol=1e-4 * scale)
    np.testing.assert_allclose(merged.m2 / 40, rows.var(0), rtol=1e-3, atol=1e-5 * (mean**2))


def test_an_empty_side_changes_nothing():
    stats, empty = plain(np.random.default_rng(0).normal(size=(40, 3))), init_stats((3,))
    assert_same_stats(merge(stats, empty), stats, rtol=0)
    assert_same_stats(merge(empty, stats), stats, rtol=0)
    assert_same_stats(merge(empty, empty), empty, rtol=0)


def test_updates_match_numpy_over_all_leading_axes():
    rows = np.random.default_rng(1).normal(3.0, 2.0, size=(6, 4, 5, 3)).astype(np.float32)  # 6 rollouts of [4, 5] rows
    stats = init_stats((3,))
    for rollout in rows:
        stats = update(stats, rollout)
    assert_same_stats(stats, plain(rows.reshape(-1, 3)), rtol=1e-5)


def test_update_of_scalar_rows():
    assert_same_stats(update(init_stats(()), jnp.array([[1.0, 2.0], [3.0, 6.0]])), RunningStats(4.0, 3.0, 14.0))


def test_update_of_images_of_integers():
    rows = np.random.default_rng(2).integers(0, 256, size=(7, 2, 2), dtype=np.uint8)
    assert_same_stats(update(init_stats((2, 2)), rows), plain(rows.astype(np.float64)), rtol=1e-5)


def test_a_large_mean_does_not_eat_the_variance():
    # A sum of squares would hold 1e8 per row, to within 8.
    rows = (1e4 + np.random.default_rng(3).normal(size=(6, 4, 5, 3))).astype(np.float32)
    stats = init_stats((3,))
    for rollout in rows:
        stats = update(stats, rollout)
    np.testing.assert_allclose(stats.m2 / stats.count, rows.reshape(-1, 3).var(0, dtype=np.float64), rtol=0.01)


def test_constant_rows_normalize_to_zero():
    stats = update(init_stats((3,)), jnp.full((4, 5, 3), 2.5))
    np.testing.assert_array_equal(normalize(stats, jnp.full((2, 3), 2.5)), np.zeros((2, 3)))


def test_normalize_by_hand():
    # Mean 1, variance 4: std 2 up to eps.
    stats = RunningStats(jnp.float32(2.0), jnp.array([1.0, 1.0]), jnp.array([8.0, 8.0]))
    rows = jnp.array([[1.0, 3.0], [-3.0, 1001.0], [0.0, -1001.0]])
    np.testing.assert_allclose(normalize(stats, rows), [[0.0, 1.0], [-2.0, 10.0], [-0.5, -10.0]], rtol=1e-6)
    np.testing.assert_allclose(normalize(stats, rows, 1.5)[1], [-1.5, 1.5], rtol=1e-6)


def test_normalize_with_no_rows_is_the_identity():
    rows = np.random.default_rng(4).normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(normalize(init_stats((3,)), rows), rows)
    np.testing.assert_array_equal(normalization.standard_deviation(init_stats((3,))), np.ones(3))


@property_test
@given(seeds, st.floats(0, 1, width=32))
def test_return_trace_matches_a_loop_and_leaks_into_no_episode(seed, discount):
    rng = np.random.default_rng(seed)
    start, rewards, done = rng.normal(size=3), rng.normal(size=(8, 3)), rng.random((8, 3)) < 0.3
    expected, running = np.zeros((8, 3)), start.copy()
    for t in range(8):
        for b in range(3):
            running[b] = discount * running[b] + rewards[t, b]
            expected[t, b] = running[b]
            if done[t, b]:
                running[b] = 0.0
    end, trace = return_trace(*(jnp.asarray(x, jnp.float32) for x in (start, rewards)), done, discount)
    np.testing.assert_allclose(trace, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(end, running, rtol=1e-5, atol=1e-5)


def test_return_trace_continues_over_rollouts():
    rng = np.random.default_rng(5)
    start, rewards, done = jnp.zeros(3), rng.normal(size=(16, 3)).astype(np.float32), rng.random((16, 3)) < 0.2
    middle, first = return_trace(start, rewards[:8], done[:8], 0.9)
    end, second = return_trace(middle, rewards[8:], done[8:], 0.9)
    whole_end, whole = return_trace(start, rewards, done, 0.9)
    np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-6)
    np.testing.assert_allclose(end, whole_end, rtol=1e-6)


def test_whiten_by_hand():
    np.testing.assert_allclose(whiten(jnp.array([1.0, 2.0, 3.0])), np.array([-1, 0, 1]) * np.sqrt(1.5), rtol=1e-6)
    masked = whiten(jnp.array([1.0, 99.0, 3.0]), jnp.array([True, False, True]))
    np.testing.assert_allclose(masked, [-1.0, 0.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("garbage", [0.0, 1e30, np.nan, np.inf])
def test_whiten_does_not_look_at_masked_elements(garbage):
    rng = np.random.default_rng(6)
    values, mask = rng.normal(size=(4, 5)).astype(np.float32), rng.random((4, 5)) < 0.6
    result = whiten(jnp.where(mask, values, garbage), mask)
    kept = values[mask]
    np.testing.assert_allclose(result[mask], (kept - kept.mean()) / kept.std(), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(result[~mask], 0.0)


@property_test
@given(seeds, st.floats(-100, 100, width=32), st.floats(0.1, 100))
def test_whiten_has_mean_zero_and_deviation_one(seed, mean, scale):
    result = whiten(jnp.asarray(mean + scale * np.random.default_rng(seed).normal(size=(4, 5)), jnp.float32))
    np.testing.assert_allclose([np.mean(result), np.std(result)], [0.0, 1.0], atol=2e-4)


def test_whiten_of_one_element_or_none_is_zero():
    assert whiten(jnp.array([3.7])) == 0.0
    np.testing.assert_array_equal(whiten(jnp.array([3.7, jnp.nan]), jnp.array([True, False])), [0.0, 0.0])
    np.testing.assert_array_equal(whiten(jnp.array([3.7, jnp.nan]), jnp.array([False, False])), [0.0, 0.0])


@pytest.mark.parametrize("value", [0.0, 2.5, 0.1, -3.3, 1000.1])
def test_whiten_of_equal_elements_is_zero(value):
    # The mean of equal numbers is not that number in float32: what rounding leaves must not be scaled up to 1.
    np.testing.assert_array_equal(whiten(jnp.full(1000, value)), np.zeros(1000))


def test_explained_variance_by_hand():
    targets = jnp.array([0.0, 1.0])
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(targets + 5.0, targets) == 1.0  # a constant offset explains all of the variance
    assert explained_variance(jnp.array([7.0, 7.0]), targets) == 0.0
    assert explained_variance(jnp.array([1.0, 0.0]), targets) == -3.0  # Var(+-1) = 1 against 1/4


@property_test
@given(seeds)
def test_explained_variance_is_at_most_one(seed):
    values, targets = np.random.default_rng(seed).normal(size=(2, 12)).astype(np.float32)
    result = explained_variance(values, targets)
    assert result <= 1.0
    np.testing.assert_allclose(result, 1 - np.var(targets - values) / np.var(targets), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 2.5, 0.1, -3.3, 1000.1])
def test_explained_variance_of_constant_targets_is_zero(value):
    assert explained_variance(jnp.arange(1000.0), jnp.full(1000, value)) == 0.0
