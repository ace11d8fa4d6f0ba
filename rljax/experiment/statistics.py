"""Aggregate scores over seeds, and how sure of them one can be.

The interquartile mean and its stratified bootstrap interval of Agarwal et al. (2021), "Deep Reinforcement Learning
at the Edge of the Statistical Precipice", arXiv:2108.13264. A score is one number a seed: the mean over that seed's
evaluation episodes. Seeds are what is independent between runs, so seeds are what is resampled, never episodes.
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
      ValueError: the data set does not have both anchors.
    """
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
