import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.ops import returns

GAMMA, LAMBDA, CLIP_RHO, CLIP_C = 0.9, 0.7, 1.2, 0.8
property_test = settings(deadline=None, max_examples=25, derandomize=True)


def steps_of_episode(terminated, truncated, t):
    """The steps from ``t`` to the last one of its episode, or of the trajectory."""
    last = t
    while last < len(terminated) - 1 and not (terminated[last] or truncated[last]):
        last += 1
    return range(t, last + 1)


def loop_n_step(r, nv, terminated, truncated, n):
    out = np.zeros(len(r))
    for t in range(len(r)):
        for k, s in enumerate(list(steps_of_episode(terminated, truncated, t))[:n]):
            out[t] += GAMMA**k * r[s]
        out[t] += 0.0 if terminated[s] else GAMMA ** (k + 1) * nv[s]
    return out


def loop_lambda(r, nv, terminated, truncated, lambda_):
    """The forward view: a geometric mixture of n-step returns."""
    n_step = [loop_n_step(r, nv, terminated, truncated, n) for n in range(1, len(r) + 1)]
    out = np.zeros(len(r))
    for t in range(len(r)):
        length = len(steps_of_episode(terminated, truncated, t))
        for n in range(1, length):
            out[t] += (1 - lambda_) * lambda_ ** (n - 1) * n_step[n - 1][t]
        out[t] += lambda_ ** (length - 1) * n_step[length - 1][t]
    return out


def deltas(r, v, nv, terminated):
    return np.array([r[t] + (0.0 if terminated[t] else GAMMA * nv[t]) - v[t] for t in range(len(r))])


def loop_gae(r, v, nv, terminated, truncated):
    """The forward view: a discounted sum of temporal differences to the end of the episode."""
    delta = deltas(r, v, nv, terminated)
    out = np.zeros(len(r))
    for t in range(len(r)):
        for k, s in enumerate(steps_of_episode(terminated, truncated, t)):
            out[t] += (GAMMA * LAMBDA) ** k * delta[s]
    return out


def loop_vtrace(r, v, nv, terminated, truncated, log_ratio):
    rho, c = np.minimum(np.exp(log_ratio), CLIP_RHO), LAMBDA * np.minimum(np.exp(log_ratio), CLIP_C)
    delta = rho * deltas(r, v, nv, terminated)
    targets, advantages = np.array(v, float), np.zeros(len(r))
    for t in range(len(r)):
        weight = 1.0
        for s in steps_of_episode(terminated, truncated, t):
            targets[t] += weight * delta[s]
            weight *= GAMMA * c[s]
    for t in range(len(r)):
        ends = t == len(r) - 1 or terminated[t] or truncated[t]
        following = 0.0 if terminated[t] else nv[t] if ends else targets[t + 1]
        advantages[t] = rho[t] * (r[t] + GAMMA * following - v[t])
    return advantages, targets


def loops(r, v, nv, terminated, truncated, log_ratio):
    """Every function of the module on one column ``[T]``, in plain Python."""
    advantages = loop_gae(r, v, nv, terminated, truncated)
    vtrace_advantages, vtrace_targets = loop_vtrace(r, v, nv, terminated, truncated, log_ratio)
    return {
        "gae advantages": advantages,
        "gae targets": advantages + v,
        "lambda_returns": loop_lambda(r, nv, terminated, truncated, LAMBDA),
        "discounted_returns": loop_n_step(r, nv, terminated, truncated, len(r)),
        "n_step_returns 1": loop_n_step(r, nv, terminated, truncated, 1),
        "n_step_returns 3": loop_n_step(r, nv, terminated, truncated, 3),
        "vtrace advantages": vtrace_advantages,
        "vtrace targets": vtrace_targets,
    }


@jax.jit
def ours(r, v, nv, terminated, truncated, log_ratio, discount=GAMMA, lambda_=LAMBDA):
    advantages, targets = returns.gae(r, v, nv, terminated, truncated, discount, lambda_)
    vtrace_advantages, vtrace_targets = returns.vtrace(
        r, v, nv, terminated, truncated, log_ratio, discount, lambda_, CLIP_RHO, CLIP_C
    )
    return {
        "gae advantages": advantages,
        "gae targets": targets,
        "lambda_returns": returns.lambda_returns(r, nv, terminated, truncated, discount, lambda_),
        "discounted_returns": returns.discounted_returns(r, nv, terminated, truncated, discount),
        "n_step_returns 1": returns.n_step_returns(r, nv, terminated, truncated, discount, 1),
        "n_step_returns 3": returns.n_step_returns(r, nv, terminated, truncated, discount, 3),
        "vtrace advantages": vtrace_advantages,
        "vtrace targets": vtrace_targets,
    }


NAMES = list(loops(*np.zeros((3, 1)), *np.zeros((2, 1), bool), np.zeros(1)))


def trajectory(seed, shape, consistent=False):
    """Random arguments. Every value differs; ``consistent`` makes V(next[t]) = V[t + 1] inside an episode."""
    rng = np.random.default_rng(seed)
    r, v, nv, log_ratio = rng.normal(size=(4, *shape)).astype(np.float32)
    terminated, truncated = rng.random((2, *shape)) < 0.25
    if consistent:
        inside = ~(terminated | truncated)[:-1]
        nv[:-1] = np.where(inside, v[1:], nv[:-1])
    return [r, v, nv, terminated, truncated, log_ratio]


@pytest.fixture(scope="module")
def flag_table():
    """All 4^4 ways to set the two flags at each of four steps, one a column."""
    r, v, nv, _, _, log_ratio = trajectory(0, (4, 256))
    codes = np.array(list(itertools.product(range(4), repeat=4))).T
    arguments = [r, v, nv, codes % 2 == 1, codes >= 2, log_ratio]
    columns = [loops(*(x[:, b] for x in arguments)) for b in range(256)]
    return ours(*arguments), {name: np.stack([c[name] for c in columns], 1) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_all_flags_match_a_plain_loop(flag_table, name):
    np.testing.assert_allclose(flag_table[0][name], flag_table[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (False, False, [-0.1875, -4.75, -7.0]),
        (False, True, [0.25, -3.0, -7.0]),  # the bootstrap stays, the recursion stops
        (True, False, [-3.5, -18.0, -7.0]),  # no bootstrap
        (True, True, [-3.5, -18.0, -7.0]),  # a terminal state has no value, limit or not
    ],
)
def test_gae_by_hand(terminated, truncated, expected):
    flags = [jnp.array([False, flag, False]) for flag in (terminated, truncated)]
    r, v, nv = jnp.array([1.0, 2.0, 3.0]), jnp.array([10.0, 20.0, 30.0]), jnp.array([20.0, 30.0, 40.0])
    advantages, targets = returns.gae(r, v, nv, *flags, 0.5, 0.5)
    np.testing.assert_array_equal(advantages, expected)
    np.testing.assert_array_equal(targets, np.array(expected) + v)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2)])
def test_trailing_axes_are_independent_columns(shape):
    arguments = trajectory(1, shape)
    result = ours(*arguments)
    columns = [x.reshape(5, -1) for x in arguments]
    for b in range(columns[0].shape[1]):
        for name, expected in loops(*(x[:, b] for x in columns)).items():
            np.testing.assert_allclose(np.reshape(result[name], (5, -1))[:, b], expected, rtol=1e-5, atol=1e-5)


def test_lambda_zero_is_one_step():
    arguments = trajectory(2, (4, 256))
    result = ours(*arguments, GAMMA, 0.0)
    one_step = loop_n_step_columns(arguments, 1)
    np.testing.assert_allclose(result["gae targets"], one_step, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result["lambda_returns"], one_step, rtol=1e-5, atol=1e-5)


def test_lambda_one_is_monte_carlo():
    arguments = trajectory(3, (4, 256), consistent=True)
    result = ours(*arguments, GAMMA, 1.0)
    monte_carlo = loop_n_step_columns(arguments, 4)
    np.testing.assert_allclose(result["gae targets"], monte_carlo, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result["lambda_returns"], monte_carlo, rtol=1e-5, atol=1e-5)


def loop_n_step_columns(arguments, n):
    r, _, nv, terminated, truncated, _ = arguments
    return np.stack([loop_n_step(*(x[:, b] for x in (r, nv, terminated, truncated)), n) for b in range(r.shape[1])], 1)


def test_on_policy_vtrace_is_the_discounted_return():
    r, v, nv, terminated, truncated, _ = arguments = trajectory(4, (4, 256), consistent=True)
    advantages, targets = jax.jit(returns.vtrace)(r, v, nv, terminated, truncated, np.zeros_like(r), GAMMA)
    expected = loop_n_step_columns(arguments, 4)
    np.testing.assert_allclose(targets, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantages, expected - v, rtol=1e-5, atol=1e-5)


def test_vtrace_clips_by_hand():
    # One step, V = 1, r = 2, terminal: delta = 1; the ratio of 3 is cut to 1, or to 2 with clip_rho = 2.
    arguments = [jnp.array([x]) for x in (2.0, 1.0, 9.0)] + [jnp.array([True]), jnp.array([False]), jnp.log(jnp.array([3.0]))]
    assert [float(x[0]) for x in returns.vtrace(*arguments, 0.9)] == [1.0, 2.0]
    np.testing.assert_allclose(returns.vtrace(*arguments, 0.9, clip_rho=2.0), [[2.0], [3.0]], rtol=1e-6)


def test_vtrace_of_actions_never_taken_by_the_learner_keeps_the_values():
    r, v, nv, terminated, truncated, _ = trajectory(5, (4, 256))
    advantages, targets = jax.jit(returns.vtrace)(r, v, nv, terminated, truncated, np.full_like(r, -np.inf), GAMMA)
    np.testing.assert_array_equal(targets, v)
    np.testing.assert_array_equal(advantages, np.zeros_like(v))


@pytest.mark.parametrize("odd", range(5))
@pytest.mark.parametrize("function", ["gae", "lambda_returns", "discounted_returns", "n_step_returns", "vtrace"])
def test_wrong_shapes_raise(function, odd):
    needs_values = function in ("gae", "vtrace")
    names = ["r", "v", "nv", "terminated", "truncated"] if needs_values else ["r", "nv", "terminated", "truncated"]
    arrays = [jnp.zeros((4, 2), bool if name.startswith("t") else jnp.float32) for name in names]
    arrays += [jnp.zeros((4, 2))] if function == "vtrace" else []
    odd = odd % len(arrays)
    arrays[odd] = arrays[odd][:, :1]  # would broadcast
    extra = {"gae": [0.9], "lambda_returns": [0.9], "n_step_returns": [2]}.get(function, [])
    with pytest.raises(AssertionError):
        getattr(returns, function)(*arrays, 0.9, *extra)


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_one_raises(n):
    no = jnp.zeros(3, bool)
    with pytest.raises(ValueError, match="at least 1"):
        returns.n_step_returns(jnp.zeros(3), jnp.zeros(3), no, no, 0.9, n)


def test_n_beyond_the_trajectory_is_the_discounted_return():
    r, _, nv, terminated, truncated, _ = trajectory(6, (5, 3))
    long = jax.jit(lambda *x: returns.n_step_returns(*x, GAMMA, 99))(r, nv, terminated, truncated)
    np.testing.assert_allclose(long, ours(*trajectory(6, (5, 3)))["discounted_returns"], rtol=1e-6, atol=1e-6)


# A diverged terminal observation has no value that anyone may look at, and one episode's NaN is no other's business.


def test_nan_value_of_a_terminal_state_is_not_looked_at():
    arguments = trajectory(8, (5, 3))
    broken = [*arguments]
    broken[2] = np.where(arguments[3], np.nan, arguments[2]).astype(np.float32)
    assert np.isnan(broken[2]).any()
    expected = ours(*arguments)
    for name, result in ours(*broken).items():
        np.testing.assert_array_equal(result, expected[name], err_msg=name)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_nan_does_not_leak_into_the_episode_before(end):
    arguments = trajectory(9, (5, 3))
    arguments[3][2], arguments[4][2] = end == "terminated", end == "truncated"
    broken = [np.where(np.arange(5)[:, None] > 2, np.nan, x).astype(np.float32) for x in arguments[:3]] + arguments[3:]
    expected = ours(*arguments)
    for name, result in ours(*broken).items():
        np.testing.assert_array_equal(result[:3], expected[name][:3], err_msg=name)


seeds = st.integers(0, 2**31)
unit = st.floats(0, 1, width=32)


@property_test
@given(seeds, st.permutations(range(3)), unit, unit)
def test_permuting_columns_commutes(seed, order, discount, lambda_):
    arguments = trajectory(seed, (5, 3))
    order = list(order)
    permuted = ours(*(x[:, order] for x in arguments), discount, lambda_)
    for name, result in ours(*arguments, discount, lambda_).items():
        np.testing.assert_allclose(permuted[name], result[:, np.array(order)], rtol=1e-5, atol=1e-6)


@property_test
@given(seeds, seeds, st.integers(0, 3), st.sampled_from(["terminated", "truncated"]), unit)
def test_an_episode_end_makes_the_halves_independent(seed, other, cut, end, lambda_):
    first, second = trajectory(seed, (5, 3)), trajectory(other, (5, 3))
    first[3][cut], first[4][cut] = end == "terminated", end == "truncated"
    spliced = [np.concatenate([a[: cut + 1], b[cut + 1 :]]) for a, b in zip(first, second, strict=True)]
    results = [ours(*x, GAMMA, lambda_) for x in (first, second, spliced)]
    for name in NAMES:
        np.testing.assert_allclose(results[2][name][: cut + 1], results[0][name][: cut + 1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(results[2][name][cut + 1 :], results[1][name][cut + 1 :], rtol=1e-5, atol=1e-6)


@property_test
@given(seeds, unit, unit)
def test_gae_targets_are_lambda_returns(seed, discount, lambda_):
    result = ours(*trajectory(seed, (5, 3), consistent=True), discount, lambda_)
    np.testing.assert_allclose(result["gae targets"], result["lambda_returns"], rtol=1e-5, atol=1e-5)


@property_test
@given(seeds, st.floats(-8, 8, width=32))
def test_everything_is_linear_in_rewards_and_values(seed, scale):
    arguments = trajectory(seed, (5, 3))
    scaled = ours(*(scale * x for x in arguments[:3]), *arguments[3:])
    for name, result in ours(*arguments).items():
        np.testing.assert_allclose(scaled[name], scale * result, rtol=1e-4, atol=1e-5)


def test_gae_folds_forced_steps_into_the_transition_of_the_choice_before():
    """Choices at 0 and 3; 1, 2 and 4 are forced, and the episode ends at 4. By hand with discount 1/2 and lambda 1/2: what is
    left is a trajectory of two steps, of rewards 1 + 2 + 4 and 8 + 16."""
    acts = jnp.asarray([True, False, False, True, False, True])
    rewards = jnp.asarray([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    values = jnp.asarray([10.0, 99.0, 99.0, 20.0, 99.0, 5.0])
    following = jnp.asarray([99.0, 99.0, 20.0, 99.0, 30.0, 7.0])
    no = jnp.zeros(6, bool)
    for kind, bootstrap in (("terminated", 0.0), ("truncated", 30.0)):
        flags = {"terminated": no, "truncated": no, kind: no.at[4].set(True)}
        advantages, targets = returns.gae(rewards, values, following, **flags, discount=0.5, lambda_=0.5, acts=acts)
        last = 24.0 + 0.5 * bootstrap - 20.0
        first = 7.0 + 0.5 * 20.0 - 10.0 + 0.25 * last
        np.testing.assert_allclose(advantages[jnp.asarray([0, 3, 5])], [first, last, 32.0 + 3.5 - 5.0])
        np.testing.assert_allclose(targets[0], first + 10.0)


def test_gae_where_every_step_is_a_choice_is_gae():
    keys = jax.random.split(jax.random.key(0), 5)
    rewards, values, following = (jax.random.normal(k, (9, 4)) for k in keys[:3])
    terminated, truncated = (jax.random.bernoulli(k, 0.2, (9, 4)) for k in keys[3:])
    arguments = (rewards, values, following, terminated, truncated, 0.9, 0.8)
    chex.assert_trees_all_close(returns.gae(*arguments), returns.gae(*arguments, acts=jnp.ones((9, 4), bool)))
