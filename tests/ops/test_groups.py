import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.ops import groups

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
group_advantages = jit(groups.group_advantages, static_argnames=("scale", "ddof"))
leave_one_out = jit(groups.leave_one_out_advantages)
reinforce_plus_plus = jit(groups.reinforce_plus_plus_advantages, static_argnames=("centre", "ddof"))
whiten = jit(groups.whiten, static_argnames="ddof")
REWARDS = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
VALID = np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)  # all, some, one, none
HALF = np.sqrt(0.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eps": 0.0}, [-HALF, HALF]),  # the deviation of 0 and 1 is the root of 1/2, or of 1/4 with ddof 0
        ({"ddof": 0, "eps": 0.0}, [-1.0, 1.0]),
        ({"ddof": 0, "eps": 0.5}, [-0.5, 0.5]),
        ({}, [-0.5 / (HALF + 1e-4), 0.5 / (HALF + 1e-4)]),
        ({"scale": "none"}, [-0.5, 0.5]),  # and no eps
        ({"scale": "none", "eps": 9.0}, [-0.5, 0.5]),
    ],
)
def test_a_pair_by_hand(options, expected):
    np.testing.assert_allclose(group_advantages(jnp.array([[0.0, 1.0]]), **options), [expected], rtol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_groups_are_rows(ddof):
    expected = (REWARDS - REWARDS.mean(1, keepdims=True)) / (REWARDS.std(1, ddof=ddof, keepdims=True) + 0.1)
    np.testing.assert_allclose(group_advantages(REWARDS, ddof=ddof, eps=0.1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_the_batch_scales_by_one_deviation_and_centres_each_group(ddof):
    # Groups far apart: the deviation is that around the mean of all rewards.
    rewards = jnp.array([[0.0, 2.0], [10.0, 16.0]])  # mean 7, squares 49 + 25 + 9 + 81
    deviation = np.sqrt(164 / (4 - ddof))
    expected = np.array([[-1.0, 1.0], [-3.0, 3.0]]) / deviation
    np.testing.assert_allclose(group_advantages(rewards, scale="batch", ddof=ddof, eps=0.0), expected, rtol=1e-6)
    valid = np.array([[True, True], [True, False]])  # mean 4, squares 16 + 4 + 36
    expected = np.array([[-1.0, 1.0], [0.0, 0.0]]) / np.sqrt(56 / (3 - ddof))
    np.testing.assert_allclose(group_advantages(rewards, valid, scale="batch", ddof=ddof, eps=0.0), expected, rtol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_flat_group_is_exactly_zero(scale, eps):
    # 0.1 has no exact mean of seven in float32: what rounding leaves must not be scaled up.
    rewards = np.array([[0.1] * 7, [0.0] * 7, [-1e6 / 3] * 7], np.float32)
    np.testing.assert_array_equal(group_advantages(rewards, scale=scale, eps=eps), np.zeros((3, 7)))
    rewards[0, 3] = 0.2
    result = np.asarray(group_advantages(rewards, scale=scale, eps=eps))
    np.testing.assert_array_equal(result[1:], np.zeros((2, 7)))
    assert result[0, 3] > 0


@pytest.mark.parametrize("garbage", [0.0, 1e30, np.nan, np.inf])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_invalid_members_leave_mean_and_deviation_alone(scale, garbage):
    result = np.asarray(group_advantages(np.where(VALID, REWARDS, np.float32(garbage)), VALID, scale=scale, eps=0.0))
    np.testing.assert_array_equal(result[~VALID], 0.0)
    for row in range(2):
        kept = REWARDS[row, VALID[row]]
        deviation = {"group": kept.std(ddof=1), "batch": REWARDS[VALID].std(ddof=1), "none": 1.0}[scale]
        np.testing.assert_allclose(result[row, VALID[row]], (kept - kept.mean()) / deviation, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result[2:], np.zeros((2, 5)))  # one alone is a flat group, and none is finite


def test_an_invalid_member_does_not_make_a_group_uneven():
    # Neither a larger nor a smaller one.
    result = group_advantages(jnp.array([[3.0, 3.0, 8.0], [-3.0, -3.0, -8.0]]), np.array([[True, True, False]] * 2), eps=0.0)
    np.testing.assert_array_equal(result, np.zeros((2, 3)))


@pytest.mark.parametrize("garbage", [0.0, np.nan])
def test_leave_one_out_by_hand(garbage):
    # Against the mean of the other two; of the other one; alone; in a group of nobody.
    rewards = jnp.array([[1.0, 2.0, 6.0], [1.0, garbage, 6.0], [1.0, garbage, garbage], [garbage] * 3])
    valid = np.array([[1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]], bool)
    expected = [[-3.0, -1.5, 4.5], [-5.0, 0.0, 5.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(leave_one_out(rewards, valid), expected, rtol=1e-6)


def test_leave_one_out_is_the_centred_reward_scaled_up():
    expected = 5 / 4 * (REWARDS - REWARDS.mean(1, keepdims=True))
    np.testing.assert_allclose(leave_one_out(REWARDS), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(leave_one_out(REWARDS), 5 / 4 * group_advantages(REWARDS, scale="none"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
def test_whitening_against_numpy(ddof, garbage):
    kept = REWARDS[VALID]
    expected = np.zeros(REWARDS.shape)
    expected[VALID] = (kept - kept.mean()) / np.sqrt(kept.var(ddof=ddof) + 0.1)
    result = whiten(np.where(VALID, REWARDS, np.float32(garbage)), VALID, ddof=ddof, eps=0.1)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    result = whiten(REWARDS[:, 0], ddof=ddof, eps=0.0)
    np.testing.assert_allclose([result.mean(), result.var(ddof=ddof)], [0.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_whitening_of_one_value_or_equal_ones_is_exactly_zero(ddof, eps):
    assert whiten(jnp.array([3.0]), ddof=ddof, eps=eps) == 0.0
    np.testing.assert_array_equal(whiten(jnp.full((3, 7), -1e6 / 3), ddof=ddof, eps=eps), np.zeros((3, 7)))
    mask = np.array([[False, True], [False, False]])
    np.testing.assert_array_equal(whiten(jnp.array([[5.0, 1.0], [2.0, 3.0]]), mask, ddof=ddof, eps=eps), np.zeros((2, 2)))
    np.testing.assert_array_equal(whiten(jnp.ones((2, 2)), np.zeros((2, 2), bool), ddof=ddof, eps=eps), np.zeros((2, 2)))


@pytest.mark.parametrize("ddof", [0, 1])
def test_reinforce_plus_plus_against_numpy(ddof):
    result = reinforce_plus_plus(REWARDS, VALID, ddof=ddof)
    np.testing.assert_array_equal(result, whiten(REWARDS, VALID, ddof=ddof))
    centred = np.zeros(REWARDS.shape)
    for row, valid in enumerate(VALID[:2]):
        centred[row, valid] = REWARDS[row, valid] - REWARDS[row, valid].mean()
    expected = centred / np.sqrt((centred**2).sum() / (VALID.sum() - ddof))  # the mean is 0
    result = reinforce_plus_plus(np.where(VALID, REWARDS, np.nan), VALID, centre="group", ddof=ddof)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("centre", ["batch", "group"])
def test_reinforce_plus_plus_of_flat_groups(centre, eps):
    rewards = np.array([[0.1] * 7, [0.1] * 7], np.float32)
    np.testing.assert_array_equal(reinforce_plus_plus(rewards, centre=centre, eps=eps), np.zeros((2, 7)))
    rewards[1] = -1e6 / 3
    result = np.asarray(reinforce_plus_plus(rewards, centre=centre, eps=eps))
    if centre == "group":
        np.testing.assert_array_equal(result, np.zeros((2, 7)))
    else:  # groups that did better than others are praised
        np.testing.assert_allclose(result, np.sqrt(13 / 14) * np.array([[1.0] * 7, [-1.0] * 7]), rtol=1e-5)
    assert reinforce_plus_plus(jnp.array([[2.0]]), centre=centre, eps=eps) == 0.0


@pytest.mark.parametrize("flat", [1, 4])
@pytest.mark.parametrize("name", ["group", "batch", "none", "leave one out", "whiten", "REINFORCE++ batch", "REINFORCE++ group"])
def test_gradients_are_finite(name, flat):
    # With flat groups, invalid members, one valid member and none.
    rewards = np.where(VALID, REWARDS, np.nan).astype(np.float32)
    rewards[:flat] = 0.5

    def first_column(rewards):
        if name == "leave one out":
            return groups.leave_one_out_advantages(rewards, jnp.asarray(VALID))[:, 0].sum()
        if name == "whiten":
            return groups.whiten(rewards, jnp.asarray(VALID), eps=0.0)[:, 0].sum()
        if name.startswith("REINFORCE"):
            centre = name.split()[1]
            return groups.reinforce_plus_plus_advantages(rewards, jnp.asarray(VALID), centre=centre, eps=0.0)[:, 0].sum()  # type: ignore[arg-type]
        return groups.group_advantages(rewards, jnp.asarray(VALID), scale=name)[:, 0].sum()

    gradient = np.asarray(jit(jax.grad(first_column))(rewards))
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(gradient[~VALID], 0.0)


def test_unknown_kinds_raise():
    with pytest.raises(ValueError, match=r"scale must be .* got 'std'"):
        groups.group_advantages(jnp.zeros((2, 2)), scale="std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"centre must be .* got 'none'"):
        groups.reinforce_plus_plus_advantages(jnp.zeros((2, 2)), centre="none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [groups.group_advantages, groups.leave_one_out_advantages, groups.reinforce_plus_plus_advantages],
)
def test_wrong_shapes_raise(function):
    with pytest.raises(AssertionError):
        function(jnp.zeros(4))
    with pytest.raises(AssertionError):
        function(jnp.zeros((4, 2)), jnp.ones((4, 1), bool))  # would broadcast
    with pytest.raises(AssertionError):
        groups.whiten(jnp.zeros((4, 2)), jnp.ones((4, 1), bool))
