"""Aggregate scores over seeds, and how sure of them one can be.

The interquartile mean, the probability of improvement, performance profiles and their stratified bootstrap intervals of
Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", arXiv:2108.13264. A score is
one number a seed: the mean over that seed's evaluation episodes. Seeds are what is independent between runs, so seeds are
what is resampled, never episodes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

Scores = ArrayLike | Sequence[ArrayLike]


def _tasks(scores: Scores) -> list[np.ndarray]:
    """Scores as one float array [seeds] a task; raises ValueError where they are empty or not finite."""
    rows = list(scores)  # pyright: ignore[reportArgumentType]
    nested = bool(rows) and np.ndim(rows[0]) == 1
    tasks = [np.asarray(task, np.float64) for task in (rows if nested else [rows])]
    if any(task.ndim != 1 or task.size == 0 for task in tasks):
        raise ValueError("scores must be [seeds] or [tasks, seeds], with a seed or more in each task")
    if not all(np.isfinite(task).all() for task in tasks):
        raise ValueError("scores hold a NaN or an infinity: drop failed seeds, by name, before aggregating")
    return tasks


def iqm(scores: ArrayLike, axis: int | None = None) -> np.ndarray | np.float64:
    """Interquartile mean: the mean of what is left after the lowest and the highest quarter are dropped.

    `scores` is [seeds] or [tasks, seeds]; with `axis=None` all of them are pooled, as rliable pools them. Of n scores
    floor(n / 4) go at each end, so under four it is the plain mean. Source: arXiv:2108.13264, section 4.3.
    """
    return stats.trim_mean(scores, 0.25, axis=axis)  # pyright: ignore[reportArgumentType]


def bootstrap_interval(
    scores: Scores,
    statistic: Callable[..., np.ndarray | np.float64] = iqm,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Stratified percentile bootstrap interval (low, high) of `statistic` over seeds.

    `scores` is [seeds], [tasks, seeds], or one [seeds] array a task where tasks have kept different numbers of seeds.
    Seeds are drawn with replacement within each task, then pooled; `statistic(pooled, axis=-1)` maps [resamples, n]
    to [resamples]. Equal arguments give an equal interval. A task with a single seed says nothing about spread: the
    interval is then (nan, nan). Raises ValueError where scores are empty or not finite.
    Source: arXiv:2108.13264, section 4.1.
    """
    tasks = _tasks(scores)
    if min(task.size for task in tasks) < 2:
        return float("nan"), float("nan")
    if all(np.ptp(task) == 0 for task in tasks):  # every resample is the sample itself
        value = float(statistic(np.concatenate(tasks), axis=-1))
        return value, value
    interval = stats.bootstrap(
        tuple(tasks),
        lambda *samples, axis: statistic(np.concatenate(samples, axis=axis), axis=axis),
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def bootstrap_intervals(table: np.ndarray, resamples: int) -> np.ndarray:
    """95% `bootstrap_interval` [points, 2] of the IQM of each row of `table` [points, seeds], of two seeds or more.

    The seeds that are drawn are the same for every row, and so are the intervals those of rows taken by themselves.
    """
    result = stats.bootstrap(
        (table,),
        iqm,
        n_resamples=resamples,
        batch=max(2**21 // table.size, 1),  # 16 MiB of resamples at once
        confidence_level=0.95,
        method="percentile",
        vectorized=True,
        axis=-1,
        rng=np.random.default_rng(0),
    )
    return np.stack(result.confidence_interval, axis=-1)


def _pairs_of_tasks(x: Scores, y: Scores) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tasks of both, one by one; raises ValueError where they do not have as many, or as `_tasks`."""
    tasks = _tasks(x), _tasks(y)
    if len(tasks[0]) != len(tasks[1]):
        raise ValueError(f"x has scores of {len(tasks[0])} tasks and y of {len(tasks[1])}: they are compared task by task")
    return list(zip(*tasks, strict=True))


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[N, K]: 1 where a score of `x` [N] is above one of `y` [K], 1/2 where they are equal, else 0."""
    return (x[:, None] > y) + 0.5 * (x[:, None] == y)


def _draws(size: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """[resamples, size]: what share of each bootstrap sample is each of the `size` seeds."""
    return rng.multinomial(size, np.full(size, 1 / size), resamples) / size


def probability_of_improvement(x: Scores, y: Scores) -> float:
    """P(X > Y): how often a seed of `x` scores above a seed of `y`, with ties counted one half, averaged over tasks.

    On one task with N scores of x and K of y it is sum_ij S(x_i, y_j) / (N K), where S is 1, 1/2 or 0: the Mann-Whitney statistic
    over its largest value. It does not ask by how much, so tasks of different scales may be averaged. `x` and `y` are [seeds],
    [tasks, seeds], or one [seeds] array a task, of the same tasks in the same order; numbers of seeds may differ.
    Raises ValueError where scores are empty or not finite, or the tasks are not as many. Source: arXiv:2108.13264, section 4.3.
    """
    return float(np.mean([_wins(*pair).mean() for pair in _pairs_of_tasks(x, y)]))


def improvement_interval(x: Scores, y: Scores, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% stratified percentile bootstrap interval (low, high) of `probability_of_improvement`, of whose arguments it is.

    Seeds of x and seeds of y are drawn with replacement, apart from each other and within each task. Equal arguments give an
    equal interval. Where one of them has a single seed on a task it is (nan, nan). Scores that do not overlap give (1, 1) or
    (0, 0), however few they are: no resample of them overlaps. Raises as `probability_of_improvement`.
    Source: arXiv:2108.13264, sections 4.1 and 4.3.
    """
    pairs = _pairs_of_tasks(x, y)
    if min(scores.size for pair in pairs for scores in pair) < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    resampled = np.zeros(resamples)
    for of_x, of_y in pairs:
        drawn = _draws(of_x.size, resamples, rng), _draws(of_y.size, resamples, rng)
        resampled += ((drawn[0] @ _wins(of_x, of_y)) * drawn[1]).sum(1) / len(pairs)
    # Shares add up to 1 only as nearly as floats do.
    low, high = np.clip(np.percentile(resampled, [2.5, 97.5]).round(12), 0.0, 1.0)
    return float(low), float(high)


def performance_profile(scores: Scores, thresholds: ArrayLike) -> np.ndarray:
    """[thresholds]: the share of runs that score above each threshold, averaged over tasks; a run-score distribution.

    `scores` is [seeds], [tasks, seeds], or one [seeds] array a task, and must be on one scale: a threshold means the same on
    every task. Raises ValueError where scores are empty or not finite. Source: arXiv:2108.13264, section 4.2.
    """
    return np.mean([_above(task, thresholds).mean(0) for task in _tasks(scores)], axis=0)


def profile_band(scores: Scores, thresholds: ArrayLike, resamples: int = 2_000, seed: int = 0) -> np.ndarray:
    """[thresholds, 2]: 95% stratified percentile bootstrap interval (low, high) of `performance_profile` at each threshold.

    Pointwise: each threshold is covered by itself, not the whole curve at once. NaN where a task has a single seed. Raises as
    `performance_profile`. Source: arXiv:2108.13264, section 4.2.
    """
    tasks = _tasks(scores)
    if min(task.size for task in tasks) < 2:
        return np.full((np.size(thresholds), 2), np.nan)
    rng = np.random.default_rng(seed)
    resampled = sum(_draws(task.size, resamples, rng) @ _above(task, thresholds) for task in tasks) / len(tasks)
    return np.clip(np.percentile(resampled, [2.5, 97.5], axis=0).T.round(12), 0.0, 1.0)


def _above(task: np.ndarray, thresholds: ArrayLike) -> np.ndarray:
    """[seeds, thresholds]: 1 where the score of a seed is above a threshold."""
    return (task[:, None] > np.asarray(thresholds)).astype(np.float64)


def best_of_n(scores: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Expected ``values`` of the one with the highest score among ``n`` of the ``N`` samples on the last axis; ``[...]``.

    Exact over all ways to draw n of them without replacement, so that one set of samples serves every n (Nakano et al. 2021,
    arXiv 2112.09332, appendix I). Samples with equal scores are taken in the order given. The KL of this policy to the one that
    was sampled from is at most ``log n - (n - 1) / n`` (Beirami et al. 2024, arXiv 2401.01879).

    Raises:
      ValueError: n is not 1 to N.
    """
    size = scores.shape[-1]
    if not 1 <= n <= size:
        raise ValueError(f"n must be 1 to the {size} samples that there are, got {n}")
    rank = np.arange(size)
    chance = special.comb(rank, n - 1) / special.comb(size, n)  # that the one of this rank is drawn, and no higher one
    order = np.argsort(scores, axis=-1, kind="stable")
    return (np.take_along_axis(values, order, -1) * chance).sum(-1)


def normalized_score(returns: Any, about: dict[str, Any], name: str) -> Any:
    """``100 (return - random) / (expert - random)`` (Fu et al. 2020, arXiv 2004.07219).

    Raises:
      ValueError: the data set does not have both anchors, or they are of another environment (``elsewhere``).
    """
    if about.get("elsewhere"):
        raise ValueError(f"{name}: its anchors are of {about['elsewhere']}, which is not, or not all of, what is evaluated here")
    missing = [key for key in ("random_return", "expert_return") if not isinstance(about.get(key), int | float)]
    if missing:
        raise ValueError(
            f"{name}: has no {missing[0]}, so its scores cannot be normalised, nor compared with those of other data sets; "
            "`rljax record --expert RUN` keeps both anchors"
        )
    low, high = about["random_return"], about["expert_return"]
    if not high > low:
        raise ValueError(f"{name}: expert_return ({high:g}) must be above random_return ({low:g})")
    return 100.0 * (np.asarray(returns) - low) / (high - low)
