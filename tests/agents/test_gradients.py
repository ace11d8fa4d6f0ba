"""The expectation of each policy-gradient estimator against the exact gradient of J, on an MDP that can be enumerated.

An agent's first update from Adam's empty moments leaves ``(1 - b1)`` times the gradient in the first moment.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import rljax
from rljax.agents import a2c, grpo, ppo, reinforce
from rljax.envs import Box, Discrete, restart, transition
from rljax.networks import actor_critic

REWARDS = np.array([[1.0, -2.0], [4.0, 3.0]])  # of the first and the second action
EPISODES = 2**15
LARGE = dict(hidden=(8,), max_grad_norm=1e9, entropy_coef=0.0, learning_rate=0.0)


@dataclasses.dataclass(frozen=True)
class TwoChoices:
    """Two binary choices; half of the reward comes after the first, by what was chosen, and the rest at the end."""

    observation_space = Box(0.0, 1.0, (3,))
    action_space = Discrete(2)

    def reset(self, key):
        return (jnp.int32(0), jnp.int32(0)), restart(jax.nn.one_hot(0, 3))

    def step(self, key, state, action):
        time, first = state
        first = jnp.where(time == 0, action, first)
        reward = jnp.where(time == 0, first.astype(jnp.float32), jnp.asarray(REWARDS, jnp.float32)[first, action])
        return (time + 1, first), transition(jax.nn.one_hot(1 + first, 3), reward, terminated=time == 1)


def exact_gradient(params):
    env = TwoChoices()
    policy = actor_critic(env.observation_space, env.action_space, hidden=(8,), has_value="critic" in params)

    def objective(flat):
        timesteps = jax.vmap(restart)(jnp.eye(3))
        _, output = policy.step(unravel(flat), (), timesteps)
        probs = jax.nn.softmax(output.distribution.logits)  # [state, action]
        returns = jnp.arange(2)[:, None] + REWARDS
        return (probs[0][:, None] * probs[1:] * returns).sum()

    flat, unravel = ravel_pytree(params)
    return np.asarray(jax.grad(objective)(flat))


GROUPS = dict(num_groups=EPISODES // 8, group_size=8, num_steps=2, aggregate="sequence-sum", num_epochs=1, num_minibatches=1)
SHARE = 7 / 8  # a group's mean holds the member's own return: (G - 1) / G of the gradient is left
CASES = {
    "reinforce, no baseline": (reinforce.Config(**LARGE, num_envs=EPISODES, num_steps=2, baseline="none"), 1.0),
    "reinforce, mean baseline": (reinforce.Config(**LARGE, num_envs=EPISODES, num_steps=3, baseline="mean"), 1.0),
    "reinforce, value baseline": (reinforce.Config(**LARGE, num_envs=EPISODES, num_steps=2, value_coef=0.0), 1.0),
    "a2c": (a2c.Config(**LARGE, num_envs=EPISODES, num_steps=2, discount=1.0, optimizer="adam", value_coef=0.0), 0.5),
    "ppo": (
        ppo.Config(
            **LARGE,
            num_envs=EPISODES,
            num_steps=2,
            discount=1.0,
            gae_lambda=1.0,
            value_coef=0.0,
            whiten_advantages="none",
            num_epochs=1,
            num_minibatches=1,
        ),
        0.5,  # the mean is over steps, two an episode
    ),
    "grpo, unscaled": (grpo.Config(**LARGE, **GROUPS, advantage="unscaled"), SHARE),
    "grpo, leave-one-out": (grpo.Config(**LARGE, **GROUPS, advantage="leave-one-out"), 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_expected_gradient_is_the_exact_one(case):
    config, share = CASES[case]
    agent = rljax.make_agent(config, TwoChoices())
    state = jax.jit(agent.init)(jax.random.key(0))
    # Away from the symmetric start, where both actions are as likely.
    state = state.replace(params=jax.tree.map(lambda x: 3.0 * x + 0.1, state.params))
    exact = exact_gradient(state.params)
    step = jax.jit(agent.step)
    moments = [ravel_pytree(step(state.replace(key=jax.random.key(i)))[0].opt_state[1].mu)[0] for i in range(4)]
    estimates = -10.0 * np.stack(moments) / share
    error = np.linalg.norm(estimates.mean(0) - exact) / np.linalg.norm(exact)
    spread = np.linalg.norm(estimates - estimates.mean(0)) / np.linalg.norm(exact)
    assert error < 0.02 and spread < 0.1  # and no estimate is right by chance
    assert np.linalg.norm(exact) > 0.1


@pytest.mark.parametrize("baseline", reinforce.BASELINES)
def test_a_baseline_lowers_the_variance_that_is_measured(baseline):
    config = reinforce.Config(**LARGE, num_envs=512, num_steps=2, baseline=baseline, gradient_variance=True)
    agent = rljax.make_agent(config, TwoChoices())
    state = jax.jit(agent.init)(jax.random.key(0))
    step = jax.jit(agent.step)
    gradients, variances = [], []
    for i in range(400):
        after, metrics = step(state.replace(key=jax.random.key(i)))
        # The policy's part of the gradient: value_coef would add its own.
        gradients.append(np.asarray(after.opt_state[1].mu) * 10.0)
        variances.append(float(metrics["gradient_variance"]))
    if baseline != "value":
        assert np.var(gradients, axis=0, ddof=1).sum() == pytest.approx(np.mean(variances), rel=0.15)
    if baseline == "mean":
        none = rljax.make_agent(dataclasses.replace(config, baseline="none"), TwoChoices())
        assert np.mean(variances) < float(jax.jit(none.step)(state)[1]["gradient_variance"])
