import itertools
import warnings

import numpy as np
import pytest
from scipy import stats

from rljax.experiment.statistics import (
    best_of_n,
    bootstrap_interval,
    bootstrap_intervals,
    improvement_interval,
    iqm,
    performance_profile,
    probability_of_improvement,
    profile_band,
)


def test_iqm_by_hand():
    assert iqm([100.0, 2.0, 3.0, -50.0]) == 2.5  # one dropped at each end
    assert iqm([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0]) == 3.5  # 2, 3, 4, 5 stay
    assert iqm([1.0, 2.0, 6.0]) == 3.0  # under four: the mean
    assert iqm([7.0]) == 7.0


def test_iqm_pools_tasks():
    scores = np.array([[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]])
    assert iqm(scores) == (2 + 3 + 10 + 11) / 4
    np.testing.assert_array_equal(iqm(scores, axis=-1), [1.5, 11.5])


def test_interval_of_two_seeds_by_hand():
    # The four resamples of {0, 1} have means 0, 1/2, 1/2, 1: 2.5% and 97.5% fall on the ends, 30% and 70% inside.
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == (0.5, 0.5)


def test_interval_matches_a_plain_bootstrap():
    scores = np.random.default_rng(1).normal(size=(2, 9))
    rng = np.random.default_rng(2)
    drawn = np.concatenate([task[rng.integers(0, 9, (20_000, 9))] for task in scores], axis=1)
    expected = np.percentile(iqm(drawn, axis=-1), [2.5, 97.5])
    np.testing.assert_allclose(bootstrap_interval(scores), expected, atol=0.03)


def test_interval_is_stratified():
    # No spread within a task: none in the interval, however far apart the tasks are.
    assert bootstrap_interval([[0.0] * 4, [10.0] * 4]) == (5.0, 5.0)
    low, high = bootstrap_interval([0.0] * 4 + [10.0] * 4)
    assert low == 0.0 and high == 10.0


def test_tasks_may_keep_different_numbers_of_seeds():
    low, high = bootstrap_interval([np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])])
    assert 1.0 < low < iqm([1.0, 2.0, 3.0, 4.0, 5.0]) < high < 5.0


def test_interval_takes_other_statistics_and_is_deterministic():
    scores = np.random.default_rng(0).normal(size=10)
    assert bootstrap_interval(scores) == bootstrap_interval(scores)
    assert bootstrap_interval(scores) != bootstrap_interval(scores, np.median)
    narrow, wide = bootstrap_interval(scores, confidence=0.5), bootstrap_interval(scores, confidence=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_degenerate_inputs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(bootstrap_interval([3.0])).all()
        assert np.isnan(bootstrap_interval([[3.0], [4.0]])).all()
        assert bootstrap_interval([0.1, 0.1, 0.1]) == (iqm([0.1] * 3),) * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_are_refused(bad):
    for scores in ([1.0, bad], [[1.0, 2.0], [3.0, bad]]):
        with pytest.raises(ValueError, match="drop failed seeds"):
            bootstrap_interval(scores)


@pytest.mark.parametrize("scores", [[], [[], []], np.zeros((2, 2, 2))])
def test_empty_or_misshapen_scores_are_refused(scores):
    with pytest.raises(ValueError, match=r"\[tasks, seeds\]"):
        bootstrap_interval(scores)


def test_intervals_of_a_table_are_those_of_its_rows():
    table = np.random.default_rng(3).normal(size=(5, 9))
    table[2] = 4.0  # no spread
    expected = [bootstrap_interval(row, resamples=500) for row in table]
    np.testing.assert_allclose(bootstrap_intervals(table, 500), expected, rtol=1e-12)
    big = np.random.default_rng(4).normal(size=(2, 2**12))  # drawn in several batches
    np.testing.assert_allclose(bootstrap_intervals(big, 300), [bootstrap_interval(row, resamples=300) for row in big], rtol=1e-12)


def test_best_of_n_by_enumeration():
    scores = np.array([[0.3, -1.0, 2.0, 0.9], [5.0, 4.0, 3.0, 2.0]])
    values = np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 1.0]])
    for n in range(1, 5):
        expected = [
            np.mean([v[list(drawn)][np.argmax(s[list(drawn)])] for drawn in itertools.combinations(range(4), n)])
            for s, v in zip(scores, values, strict=True)
        ]
        np.testing.assert_allclose(best_of_n(scores, values, n), expected)
    with pytest.raises(ValueError, match="n must be 1 to the 4"):
        best_of_n(scores, values, 5)


def test_probability_of_improvement_by_hand():
    assert probability_of_improvement([3.0, 1.0], [2.0, 0.0]) == 3 / 4  # of the four pairs 1 against 2 is lost
    assert probability_of_improvement([1.0, 1.0], [1.0]) == 1 / 2
    assert probability_of_improvement([1.0, 2.0, 3.0], [2.0]) == (0 + 1 / 2 + 1) / 3
    x, y = [[1.0, 2.0], [500.0, 600.0, 700.0]], [[0.0], [550.0]]
    assert probability_of_improvement(x, y) == (1 + 2 / 3) / 2  # a task counts once, whatever its scale and seeds
    assert probability_of_improvement(y, x) == pytest.approx(1 - (1 + 2 / 3) / 2)


def test_probability_of_improvement_is_that_of_mann_and_whitney():
    x, y = np.random.default_rng(0).integers(0, 6, (2, 9)), np.random.default_rng(1).integers(0, 6, 7)
    expected = [stats.mannwhitneyu(task, y).statistic / (9 * 7) for task in x]
    assert probability_of_improvement(x, [y, y]) == pytest.approx(np.mean(expected))


def test_interval_of_an_improvement_is_binomial_against_a_constant():
    # Of N scores k are above the others, which are all equal: a resample is a binomial draw of N with probability k / N.
    x = [1.0] * 7 + [-1.0] * 3
    expected = stats.binom.ppf([0.025, 0.975], 10, 0.7) / 10
    np.testing.assert_allclose(improvement_interval(x, [0.0] * 4), expected)
    np.testing.assert_allclose(improvement_interval([0.0] * 4, x), 1 - expected[::-1])


def test_interval_of_an_improvement_matches_a_plain_bootstrap_and_is_stratified():
    rng = np.random.default_rng(2)
    x, y = [rng.normal(0.5, 1, 8), rng.normal(100, 1, 6)], [rng.normal(0, 1, 5), rng.normal(101, 1, 9)]
    drawn = [probability_of_improvement(*([rng.choice(task, task.size) for task in of] for of in (x, y))) for _ in range(4_000)]
    np.testing.assert_allclose(improvement_interval(x, y), np.percentile(drawn, [2.5, 97.5]), atol=0.02)
    assert improvement_interval(x, y) == improvement_interval(x, y)
    # One task is surely won and the other surely lost: no doubt about one half.
    assert improvement_interval([[1.0] * 3, [0.0] * 3], [[0.0] * 3, [1.0] * 3]) == (0.5, 0.5)


def test_intervals_of_an_improvement_at_the_ends():
    assert improvement_interval([2.0, 3.0, 4.0], [0.0, 1.0]) == (1.0, 1.0)
    assert np.isnan(improvement_interval([2.0, 3.0], [1.0])).all()
    with pytest.raises(ValueError, match="x has scores of 2 tasks and y of 1"):
        probability_of_improvement([[1.0], [2.0]], [1.0])
    with pytest.raises(ValueError, match="drop failed seeds"):
        improvement_interval([1.0, np.nan], [1.0, 2.0])


def test_performance_profile_by_hand():
    scores = [[0.0, 1.0], [1.0, 2.0, 3.0, 4.0]]
    # Above 0: 1/2 and 4/4; above 1, strictly: 0 and 3/4; above 4: none.
    np.testing.assert_allclose(performance_profile(scores, [-1.0, 0.0, 1.0, 4.0]), [1.0, 3 / 4, 3 / 8, 0.0])
    np.testing.assert_allclose(performance_profile([1.0, 2.0, 3.0], [1.5]), [2 / 3])


def test_band_of_a_profile_is_binomial():
    scores = [1.0] * 7 + [3.0] * 3
    band = profile_band(scores, [0.0, 2.0, 5.0], resamples=20_000)
    np.testing.assert_allclose(band, [[1.0, 1.0], stats.binom.ppf([0.025, 0.975], 10, 0.3) / 10, [0.0, 0.0]])
    # Without spread within a task there is none, however far apart the tasks are.
    np.testing.assert_allclose(profile_band([[0.0] * 3, [9.0] * 3], [5.0]), [[0.5, 0.5]])
    assert np.isnan(profile_band([[0.0, 1.0], [2.0]], [0.5, 1.5])).all()
