"""Off-policy evaluation against the true value of a tabular MDP, whose episodes can all be written down."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.experiment.statistics import bootstrap_interval
from rljax.ops import ope, replay
from rljax.ops.dataset import make_dataset

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here

# Two states, two actions, three steps at most: action 1 in state 1 ends the episode. Next states are random.
GAMMA, STEPS = 0.8, 3
REWARD = np.array([[1.0, -0.5], [0.25, 2.0]])
NEXT = np.array([[0.3, 0.7], [0.6, 0.0]])  # probability of state 1 after (state, action)
TARGET = np.array([[0.8, 0.2], [0.4, 0.6]])
PLAYED = np.array([[0.5, 0.5], [0.7, 0.3]])


def episodes():
    """``(rewards, log_ratio, mask [N, T], states, actions, probability under PLAYED [N])`` of every episode from state 0."""
    found = {}
    for actions in itertools.product((0, 1), repeat=STEPS):
        for states in itertools.product((0, 1), repeat=STEPS - 1):
            rows, probability, state = [], 1.0, 0
            for t, action in enumerate(actions):
                rows.append((state, action))
                probability *= PLAYED[state, action]
                if (state, action) == (1, 1):
                    break
                if t < STEPS - 1:
                    probability *= NEXT[state, action] if states[t] else 1 - NEXT[state, action]
                    state = states[t]
            found[tuple(rows)] = probability  # the same start of an episode that ended has the same probability
    table = np.full((len(found), STEPS, 2), -1)
    for row, steps in zip(table, found, strict=True):
        row[: len(steps)] = steps
    states, actions = table[..., 0], table[..., 1]
    mask = states >= 0
    rewards = np.where(mask, REWARD[states, actions], 99.0)
    ratio = np.where(mask, np.log(TARGET[states, actions] / PLAYED[states, actions]), 99.0)
    return rewards, ratio, mask, states, actions, np.array(list(found.values()))


def value(policy):
    """``(V [T + 1, S], Q [T, S, A])`` with so many steps left, by dynamic programming."""
    v, q = np.zeros((STEPS + 1, 2)), np.zeros((STEPS, 2, 2))
    for t in reversed(range(STEPS)):
        for s, a in itertools.product((0, 1), repeat=2):
            following = 0.0 if (s, a) == (1, 1) else NEXT[s, a] * v[t + 1, 1] + (1 - NEXT[s, a]) * v[t + 1, 0]
            q[t, s, a] = REWARD[s, a] + GAMMA * following
        v[t] = (policy * q[t]).sum(1)
    return v, q


ALL = episodes()
TRUE, TRUE_Q = value(TARGET)


def guessed(scale):
    """``q`` and ``v`` of every step: the true ones, times ``scale``, and noise where that is not 1."""
    _, _, mask, states, actions, _ = ALL
    q = scale * TRUE_Q + (0.0 if scale == 1 else np.random.default_rng(0).standard_normal(TRUE_Q.shape))
    t = np.arange(STEPS)
    return np.where(mask, q[t, states, actions], 7.0), np.where(mask, (TARGET * q).sum(2)[t, states], 7.0)


def test_all_episodes_are_there():
    assert ALL[-1].sum() == pytest.approx(1.0)
    rewards, _, mask, _, _, probability = ALL
    returns = (np.where(mask, rewards, 0) * GAMMA ** np.arange(STEPS)).sum(1)
    assert (probability * returns).sum() == pytest.approx(value(PLAYED)[0][0, 0])


@pytest.mark.parametrize("estimator", [ope.ordinary, ope.per_decision])
def test_importance_sampling_is_unbiased(estimator):
    rewards, ratio, mask, _, _, probability = ALL
    each = np.asarray(jit(estimator)(rewards, ratio, mask, GAMMA), np.float64)
    assert (probability * each).sum() == pytest.approx(TRUE[0, 0], rel=1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_doubly_robust_is_unbiased_whatever_is_guessed(scale):
    rewards, ratio, mask, _, _, probability = ALL
    each = np.asarray(jit(ope.doubly_robust)(rewards, ratio, mask, GAMMA, *guessed(scale)), np.float64)
    assert (probability * each).sum() == pytest.approx(TRUE[0, 0], rel=1e-5)


def test_a_good_guess_lowers_the_variance():
    rewards, ratio, mask, _, _, probability = ALL

    def variance(each):
        return (probability * (np.asarray(each, np.float64) - TRUE[0, 0]) ** 2).sum()

    ordinary, decision = (variance(jit(f)(rewards, ratio, mask, GAMMA)) for f in (ope.ordinary, ope.per_decision))
    robust = variance(jit(ope.doubly_robust)(rewards, ratio, mask, GAMMA, *guessed(1.0)))
    assert robust < decision < ordinary


def drawn(number, seed):
    rows = np.random.default_rng(seed).choice(len(ALL[-1]), number, p=ALL[-1] / ALL[-1].sum())
    return [x[rows] for x in ALL[:3]]


def test_weighted_is_consistent_and_within_the_returns():
    rewards, ratio, mask = drawn(50_000, 0)
    assert float(jit(ope.weighted)(rewards, ratio, mask, GAMMA).mean()) == pytest.approx(TRUE[0, 0], abs=0.03)
    few = [x[:4] for x in (rewards, ratio, mask)]
    returns = (np.where(few[2], few[0], 0) * GAMMA ** np.arange(STEPS)).sum(1)
    assert returns.min() - 1e-5 <= float(ope.weighted(*few, GAMMA).mean()) <= returns.max() + 1e-5
    # By hand: two episodes of one step.
    one = ope.weighted(jnp.asarray([[1.0], [4.0]]), jnp.log(jnp.asarray([[3.0], [1.0]])), jnp.ones((2, 1), bool), GAMMA)
    assert float(one.mean()) == pytest.approx((3 * 1 + 1 * 4) / 4)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    held = {"weighted": 0, "per decision": 0}
    interval, each = jit(ope.weighted_interval), jit(ope.per_decision)
    for seed in range(60):
        data = drawn(200, seed)
        low, high = interval(*data, GAMMA, jax.random.key(seed))
        held["weighted"] += low <= TRUE[0, 0] <= high
        low, high = bootstrap_interval(np.asarray(each(*data, GAMMA))[:, None].mean(1), statistic=np.mean, resamples=500)
        held["per decision"] += low <= TRUE[0, 0] <= high
    assert all(count >= 50 for count in held.values()), held  # 57 of 60 are expected


def play(number, policy, rng, cut=40):
    """Episodes of the same MDP without a limit, cut after ``cut`` steps, as a data set."""
    rows = []
    for _ in range(number):
        state = 0
        for t in range(cut):
            action = int(rng.random() < policy[state, 1])
            ends = (state, action) == (1, 1)
            following = int(rng.random() < NEXT[state, action])
            rows.append((state, action, REWARD[state, action] + rng.normal(), ends, t == cut - 1 and not ends, following))
            if ends:
                break
            state = following
    state, action, reward, terminated, truncated, following = map(np.array, zip(*rows, strict=True))
    one_hot = np.eye(2, dtype=np.float32)
    return make_dataset(
        replay.Transition(
            observation=one_hot[state],
            action_mask=None,
            action=action.astype(np.int32),
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            next_observation=one_hot[following],
            next_action_mask=None,
        )
    )


def test_fitted_q_and_its_bootstrap_are_about_the_true_value():
    """Of a table, by dynamic programming without a limit of steps; behind noisy rewards, from another policy's episodes."""
    follow = np.stack([1 - NEXT, NEXT], -1)
    follow[1, 1] = 0.0
    moves = np.einsum("sa,sat->st", TARGET, follow)
    true = np.linalg.solve(np.eye(2) - GAMMA * moves, (TARGET * REWARD).sum(1))[0]

    def policy(key, observation, mask):
        return jax.random.categorical(key, observation @ jnp.log(jnp.asarray(TARGET, jnp.float32)))

    def table(params, observation, action):
        return jnp.take_along_axis(observation @ params, action[:, None], 1)[:, 0]

    data = play(400, PLAYED, np.random.default_rng(0))
    found = ope.fitted_q(
        *(table, lambda key: jnp.zeros((2, 2)), policy, data, jax.random.key(0), GAMMA),
        **dict(resamples=40, steps=600, learning_rate=0.02, target_tau=0.1),
    )
    low, high = np.quantile(found[1:], [0.025, 0.975])
    assert found[0] == pytest.approx(true, abs=0.15)
    assert low < true < high
    assert 0.05 < high - low < 0.6
    behaviour = np.linalg.solve(np.eye(2) - GAMMA * np.einsum("sa,sat->st", PLAYED, follow), (PLAYED * REWARD).sum(1))[0]
    assert not low < behaviour < high  # it is the evaluated policy's value, and not the recorded one's


def test_too_few_steps_for_the_discount_are_refused():
    """Values that have not come in yet agree with one another: a narrow interval around nothing."""
    data = play(3, PLAYED, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"steps: 5000 are too few at discount 0\.99 and target_tau 0\.005, 100000"):
        ope.fitted_q(*[lambda *x: x] * 3, data, jax.random.key(0), 0.99, steps=5000, target_tau=0.005)
