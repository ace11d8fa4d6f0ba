"""What goes wrong in training while the return still looks well, told from the metrics of a run in plain words.

The rules read metrics by their names, whichever agent logs them, and each lane by itself. What a lane has been warned of once is
not said again. The numbers below were set beside the recorded runs of `experiments/`: those that learn stay clear of them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]

# Rows in succession that must show what may pass: each is a mean over a chunk of updates, and one odd chunk is no state.
PERSIST = 3
# Share of the level: a smaller rise is not worth the name.
RISE = 0.05
# Share of the deviation over episodes: a return of 0.002 that was 0.001 has doubled, and is still nothing.
RISE_DEVIATION = 0.1
# Completions vary in length from chunk to chunk as the prompts do; a fifth more is another way of answering.
LENGTH_RISE = 0.2
# Share of the first entropy: policies that have solved Acrobot or MountainCar still have 0.02 of it, so less is too little.
ENTROPY_LEFT = 0.01
# Where the return has not risen there was no reason to narrow down at all, and less than this is early enough to say so.
ENTROPY_LEFT_IDLE = 0.05
# Nats that a density loses in each dimension of the action: its width falls to 2% of what it was. Pendulum and Ant are learnt
# with a loss of 2; runs that lost 4 were failing.
DENSITY_LOST = 4.0
# Nats: the likeliest of two actions has a probability above 0.9999, so that hardly a sample in a chunk is another one.
ENTROPY_NONE = 0.001
# Nats, new against old policy in one update: 0.01 to 0.07 in runs that learn; those above 0.2 ended below their neighbours.
KL_UPDATE = 0.2
# Nats a step to the reference: GRPO reaches 1.1 on the way from three sums in ten to all of them. From 3 on the typical token is
# twenty times as likely as the reference has it, and what the reference knew is gone.
KL_REFERENCE = 3.0
# Nats a step that a policy has no business to be away where that has earned it nothing.
KL_REFERENCE_IDLE = 1.0
# Values of gold, fewer than which show no course: some evaluations after the first, which may be of a lucky policy.
GOLD_VALUES = 6
# A component of a reward is a share, and one that is nearly 1 can rise no more.
GOLD_FULL = 0.95
# Share of groups. A task with one prompt in twenty of the right difficulty still teaches, slowly.
FLAT = 0.95
# Share of episodes. A grader may time out once in a while; one in a hundred is a pattern.
INVALID = 0.01
# Share of episodes: when most have no end, the return is that of the few that have.
UNFINISHED = 0.5
# Share of own answers, or of pairs: of 512 these are ten, which are learnt by heart.
EXAMPLES = 0.02
# Largest distance from 1 by rounding: two orders of summation differ by up to 1e-3 in a transformer in float32. Factors in
# bfloat16 have two to three digits instead of seven.
RATIO = {"float32": 2e-3, "bfloat16": 0.1}


class Warning(NamedTuple):
    """What lanes were warned of, all of them at the same step.

    Attributes:
      name: of the rule, in words.
      lanes: their numbers.
      step: environment steps per seed.
      text: one sentence with the numbers of the first of the lanes.
    """

    name: str
    lanes: tuple[int, ...]
    step: int
    text: str


class _Policy(NamedTuple):
    action_size: int
    dtype: str


def warnings(
    rows: Iterable[Row],
    action_size: int = 0,
    dtype: str = "float32",
    said: Collection[tuple[str, int]] = (),
    after: int = -1,
) -> list[Warning]:
    """Every warning of a run in the order of steps, from its rows of metrics in the order in which they were written.

    Args:
      action_size: numbers in a continuous action, whose entropy is that of a density; 0 for discrete actions.
      dtype: of the policy's products, "float32" or "bfloat16".
      said: ``(name, lane)`` pairs that are left out.
      after: judge the lanes only where they stood past this step; the rows up to it are still what they are compared with.
    """
    found: dict[tuple[int, str], list[tuple[int, str]]] = {}
    past: dict[int, list[Row]] = {}
    said = set(said)
    policy = _Policy(action_size, dtype)
    for row in rows:
        lane = past.setdefault(row["lane"], [])
        lane.append(row)
        if row["step"] <= after or row.get("finite") is not True:  # no training in this row, or the lane has failed
            continue
        for name, rule in RULES.items():
            if (name, row["lane"]) not in said and (text := rule(lane, policy)):
                said.add((name, row["lane"]))
                found.setdefault((row["step"], name), []).append((row["lane"], text))
    return [Warning(name, tuple(lane for lane, _ in of), step, of[0][1]) for (step, name), of in found.items()]


def sentence(warning: dict[str, Any], num_lanes: int) -> str:
    """A warning, as a dict, to be read: what, where, when and why."""
    lanes = warning["lanes"]
    which = ", ".join(map(str, lanes[:8])) + (", ..." if len(lanes) > 8 else "")
    where = f"lane{'s' * (len(lanes) > 1)} {which} of {num_lanes}"
    if len(lanes) == num_lanes:
        where = "every lane" if num_lanes > 1 else ""
    first = f" (numbers of lane {lanes[0]})" if len(lanes) > 1 else ""
    return f"{warning['name']}{' in ' * bool(where)}{where} at step {warning['step']:,}: {warning['text']}{first}"


def _entropy_collapse(rows: Sequence[Row], policy: _Policy) -> str | None:
    """Of policies that play; one that is taught by demonstrations may well grow certain."""
    values = _values(rows, "entropy")
    if len(values) < PERSIST or "episode/return" not in rows[-1]:
        return None
    share = ENTROPY_LEFT_IDLE if _is_flat(rows, "episode/return") else ENTROPY_LEFT
    limit = values[0] - DENSITY_LOST * policy.action_size if policy.action_size else max(share * values[0], ENTROPY_NONE)
    if max(values[-PERSIST:]) > limit:
        return None
    return (
        f"entropy {values[-1]:.2g}, at first {values[0]:.2g}; the policy does nearly the same every time and tries nothing new. "
        f"If the {_moved(rows, 'episode/return')} is not all there is to get, raise entropy_coef or lower learning_rate"
    )


def _kl_runaway(rows: Sequence[Row], policy: _Policy) -> str | None:
    """Against the policy before the update, or against the reference, by k1: it is unbiased, and k3 can be huge by one sample."""
    step = rows[-1].get("kl")
    if step is not None and step > KL_UPDATE:
        return (
            f"one update takes the policy {step:.2g} nats from where it was (kl; up to 0.05 is usual), too far for its own data; "
            "lower learning_rate or the number of passes over a batch"
        )
    values = _values(rows, "kl_reference/k1")
    is_idle = "episode/return" in rows[-1] and _is_flat(rows, "episode/return")
    if len(values) < PERSIST or min(values[-PERSIST:]) <= (KL_REFERENCE_IDLE if is_idle else KL_REFERENCE):
        return None
    gained = f", and the {_moved(rows, 'episode/return')}, has not risen for it" if is_idle else ""
    return f"the policy is {values[-1]:.2g} nats a step from its reference{gained}; raise kl_coef or lower learning_rate"


def _gold_flat(rows: Sequence[Row], policy: _Policy) -> str | None:
    """Rises of the trained return that come with length and leave some other measure of the same behaviour where it was.

    Not where an environment pays 1 for each step, since there a longer episode is the task.
    """
    returns, lengths = _values(rows, "episode/return"), _values(rows, "episode/length")
    if len(returns) < 8 or not _has_risen(rows, "episode/return") or not _has_risen(rows, "episode/length", LENGTH_RISE):
        return None
    if np.allclose(returns, lengths, rtol=1e-3):
        return None
    for name in (*sorted(name for name in rows[-1] if name.startswith("reward/")), "eval/return"):
        values = _values(rows, name)
        # A greedy policy that still earns more than the sampling one is what the latter catches up with.
        limit = _last(returns) if name == "eval/return" else GOLD_FULL
        if len(values) >= GOLD_VALUES and _last(values) < limit and _is_flat(rows, name):
            return (
                f"{_moved(rows, 'episode/return')}; length {_last(lengths):.3g}, at first {lengths[0]:.3g}; but "
                f"{_moved(rows, name, name)}: read what the policy does, for it may be paid for length"
            )
    return None


def _all_flat(rows: Sequence[Row], policy: _Policy) -> str | None:
    """Not where the return has risen: groups that agree in the end are what a solved task looks like."""
    values = _values(rows, "flat_groups")
    if len(values) < PERSIST or min(values[-PERSIST:]) < FLAT or not _is_flat(rows, "episode/return"):
        return None
    return (
        f"in {values[-1]:.0%} of the groups all members earn the same ({_moved(rows, 'episode/return')}), so that nothing is "
        "learnt; start from a policy that is sometimes right, take larger groups or easier prompts"
    )


def _invalid(rows: Sequence[Row], policy: _Policy) -> str | None:
    share = rows[-1].get("invalid")
    if share is None or share < INVALID:
        return None
    return f"the reward of {share:.1%} of the episodes could not be had; they are left out: mend the grader, or its data"


def _ratio_not_one(rows: Sequence[Row], policy: _Policy) -> str | None:
    error = rows[-1].get("ratio_error")
    if error is None or error <= RATIO[policy.dtype]:
        return None
    return (
        f"before the first gradient step of an update the policy differs from the one that played by up to {error:.2g} in the "
        "ratio, which is more than rounding: the loss does not see what was sampled"
    )


def _nothing_to_learn(rows: Sequence[Row], policy: _Policy) -> str | None:
    """Of own answers none was paid enough, or of pairs none has a preference."""
    for name, what in (("kept", "of the own answers were paid min_reward"), ("counted", "of the pairs have a preference")):
        share = rows[-1].get(name)
        if share is not None and share < EXAMPLES:
            return (
                f"{'none' if share == 0 else f'only {share:.1%}'} {what}, and the others teach nothing; start from a policy that "
                "is sometimes right, draw more answers or take easier prompts"
            )
    return None


def _unfinished(rows: Sequence[Row], policy: _Policy) -> str | None:
    values = _values(rows, "unfinished")
    if len(values) < PERSIST or min(values[-PERSIST:]) < UNFINISHED:
        return None
    return (
        f"{values[-1]:.0%} of the episodes do not end within num_steps, and what they would have earned counts nowhere; raise "
        "algo.num_steps to the longest episode"
    )


RULES: dict[str, Callable[[Sequence[Row], _Policy], str | None]] = {
    "entropy collapse": _entropy_collapse,
    "KL runaway": _kl_runaway,
    "return and length up, gold flat": _gold_flat,
    "all groups flat": _all_flat,
    "invalid rewards": _invalid,
    "episodes without an end": _unfinished,
    "nothing to learn from": _nothing_to_learn,
    "ratio not 1": _ratio_not_one,
}


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """Those that are not null, of rows in which any episode counted."""
    return [row[name] for row in rows if row.get(name) is not None and row.get("invalid") != 1.0]


def _quarter(values: Sequence[float]) -> int:
    return max(len(values) // 4, 2)


def _first(values: Sequence[float]) -> float:
    return float(np.mean(values[: _quarter(values)]))


def _last(values: Sequence[float]) -> float:
    return float(np.mean(values[-_quarter(values) :]))


def _least_rise(rows: Sequence[Row], name: str, by: float, *levels: float) -> float:
    """The smallest change that counts: a share of the level, and of the deviation over episodes where that is a metric too."""
    return max(by * max(map(abs, levels)), RISE_DEVIATION * max(_values(rows, f"{name}_std"), default=0.0))


def _has_risen(rows: Sequence[Row], name: str, by: float = RISE) -> bool:
    """Whether the last quarter of the rows is surely higher than the first: by four standard errors of the difference as well.

    The noise is told from neighbouring rows, in which a trend hardly shows.
    """
    values = _values(rows, name)
    if len(values) < 4:
        return False
    first, last = _first(values), _last(values)
    error = np.sqrt(np.mean(np.diff(values) ** 2) / _quarter(values))
    return bool(last - first > max(4 * error, _least_rise(rows, name, by, first, last)))


def _is_flat(rows: Sequence[Row], name: str) -> bool:
    """Whether the last quarter of the rows is no higher than the first row and any earlier quarter; True without a value.

    What fell and rises again is not flat: an untrained greedy policy may be lucky.
    """
    values = _values(rows, name)
    if len(values) < 2:
        return True
    means = np.convolve(values, np.full(_quarter(values), 1 / _quarter(values)), "valid")
    lowest, last = min(values[0], *means), _last(values)
    return bool(last - lowest <= _least_rise(rows, name, RISE, lowest, last))


def _moved(rows: Sequence[Row], name: str, word: str = "return") -> str:
    values = _values(rows, name)
    return f"{word} {_last(values):.3g}, at first {values[0]:.3g}" if values else f"{word} not known"
