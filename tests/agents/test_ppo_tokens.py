"""PPO on tokens: the leash by hand and at its exact optimum, forced tokens, the value head and what options refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import ppo
from rljax.agents.on_policy import first_episodes
from rljax.envs import group, vectorize
from rljax.envs.tokens import TokenEnvironment
from rljax.envs.wrappers import LearnedReward
from rljax.lm.tasks import Calculator
from rljax.networks import Transformer, transformer
from tests.agents.lookup import ENV, LEAVES, MODEL, T, log_probs, padded, reward_of
from tests.agents.test_grpo_tokens import OneQuestion, params_like

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


def config(**changes):
    plain = dict(model=MODEL, num_envs=16, num_minibatches=1, num_epochs=1, entropy_coef=0.0, discount=1.0, gae_lambda=1.0)
    return ppo.Config(**{**plain, **changes})


def leaf_probabilities(params, model=MODEL):
    tokens, mask = padded(LEAVES)
    return jnp.exp(jnp.where(mask, log_probs(params, tokens, model=model), 0.0).sum(0))


@pytest.mark.parametrize("seeds", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("beta", "value_network"), [(0.5, "shared"), (2.0, "separate")])
def test_the_leash_ends_at_the_tilted_reference(beta, value_network, seeds):
    """The best policy under ``E[r] - beta KL(pi || ref)`` is ``ref exp(r / beta) / Z`` (Ziegler et al. 2019, section 2)."""
    # Learned positions: without them a transformer cannot tell b from bb and bbb, and some of the optimum is out of its reach.
    model = Transformer(family="gpt2", layers=1, width=32, heads=2, mlp=64, positions=8, tied=True)
    agent = rljax.make_agent(
        config(
            model=model, num_envs=256, num_minibatches=4, num_epochs=2, learning_rate=3e-3, kl_coef=beta, gae_lambda=0.95,
            value_network=value_network, learning_rate_schedule="linear", anneal_steps=300.0 * 256 * T,
        ),
        ENV,
    )  # fmt: skip

    @jax.jit
    @jax.vmap
    def train(seed):
        key = jax.random.key(seed)
        start = params_like(jax.eval_shape(agent.begins_with, key), scale=0.3)
        state = agent.init(key, params=start)
        state, metrics = jax.lax.scan(lambda state, _: agent.step(state), state, length=300)
        leaves = (leaf_probabilities(p, model) for p in (start, state.params))
        return (*leaves, metrics["kl_reference/episode"][-20:].mean())

    rewards = jnp.asarray([reward_of(leaf) for leaf in LEAVES])
    for reference, reached, kl in zip(*train(jnp.arange(seeds)), strict=True):
        best = reference * jnp.exp(rewards / beta)
        best = best / best.sum()
        before, after = (0.5 * float(jnp.abs(p - best).sum()) for p in (reference, reached))
        print(f"kl_coef {beta}, {value_network}: total variation {before:.3f} before, {after:.3f} after")
        assert after < 0.05 < before
        exact = float((reached * jnp.log(reached / reference)).sum())
        assert float(kl) == pytest.approx(exact, abs=0.05)


def test_before_the_first_update_the_ratio_is_one_and_the_kl_zero():
    agent = rljax.make_agent(config(kl_coef=0.3, num_epochs=2, num_minibatches=2), ENV)
    _, metrics = jit(agent.step)(agent.init(jax.random.key(0)))
    assert float(metrics["ratio_error"]) < 1e-5
    for name in ("k1", "k2", "k3", "episode"):
        assert float(metrics[f"kl_reference/{name}"]) == 0.0
    assert float(metrics["kl_coef"]) == pytest.approx(0.3)


def test_a_longer_leash_lets_the_policy_go_further():
    @jax.jit
    def train(beta):
        agent = rljax.make_agent(config(kl_coef=beta, num_envs=64, learning_rate=3e-3, num_epochs=4), ENV)
        return jax.lax.scan(lambda state, _: agent.step(state), agent.init(jax.random.key(0)), length=60)[1]

    kls = [float(train(beta)["kl_reference/episode"][-10:].mean()) for beta in (0.1, 1.0, 10.0)]
    assert kls[0] > kls[1] > kls[2] >= -0.01


def test_the_leash_is_steered_to_its_target():
    agent = rljax.make_agent(
        config(kl_coef=0.01, kl_target=0.1, kl_horizon=300.0, num_envs=64, learning_rate=3e-3, num_epochs=4), ENV
    )
    train = jax.jit(lambda state: jax.lax.scan(lambda state, _: agent.step(state), state, length=300))
    _, metrics = train(agent.init(jax.random.key(0)))
    first = metrics["kl_coef"][0] * (1 + np.clip(metrics["kl_reference/episode"][0] / 0.1 - 1, -0.2, 0.2) * 64 / 300)
    assert float(metrics["kl_coef"][1]) == pytest.approx(float(first), rel=1e-5)
    assert float(metrics["kl_reference/episode"][-100:].mean()) == pytest.approx(0.1, abs=0.05)


def test_tokens_of_a_tool_count_for_nothing():
    """What the calculator says is no choice: no gradient, no KL, and the value of a state inside its answer is never taught."""
    task = OneQuestion(2, 1.0)
    env = TokenEnvironment(task, tool=Calculator(task))
    agent = rljax.make_agent(config(num_envs=8, kl_coef=0.1), env)
    state = agent.init(jax.random.key(0))
    policy = transformer(MODEL, env.observation_space, has_value=True)
    episodes = jit(lambda: first_episodes(policy, vectorize(env, 8), state.params, jax.random.key(1), env.max_tokens))()
    forced = np.asarray(episodes.mask & episodes.transitions.info["forced"])
    assert not np.any(np.asarray(episodes.choices) & forced)
    np.testing.assert_array_equal(np.asarray(episodes.choices) | forced, np.asarray(episodes.mask))


def test_parameters_that_were_trained_before_keep_what_they_say():
    for value_network in ("shared", "separate"):
        agent = rljax.make_agent(config(value_network=value_network), ENV)
        start = params_like(jax.eval_shape(agent.begins_with, jax.random.key(0)))
        state = agent.init(jax.random.key(1), params=start)
        np.testing.assert_array_equal(leaf_probabilities(state.params), leaf_probabilities(start))
        if value_network == "separate":
            np.testing.assert_array_equal(state.params["critic"]["embed"], start["embed"])


def test_a_learned_reward_pays_at_the_end_or_for_each_token():
    whole = LearnedReward(ENV, lambda context, lengths: lengths.astype(jnp.float32))
    each = LearnedReward(ENV, lambda context, lengths: jnp.ones((T, context.shape[0])))
    policy = transformer(MODEL, ENV.observation_space)
    params = policy.init(jax.random.key(0), jax.vmap(ENV.reset)(jax.random.key(0)[None])[1])
    for env in (whole, each):
        episodes = jit(lambda env=env: first_episodes(policy, group(env, 32, 1), params, jax.random.key(2), T))()
        lengths = episodes.mask.sum(0)
        assert len(set(lengths.tolist())) > 1
        np.testing.assert_array_equal(episodes.returns, lengths)
        paid = np.asarray(episodes.transitions.reward) != 0
        np.testing.assert_array_equal(paid, episodes.mask if env is each else episodes.last)
        gold = [reward_of(tuple(said[:n])) for said, n in zip(episodes.samples.T.tolist(), lengths.tolist(), strict=True)]
        at_last = np.where(episodes.last, episodes.transitions.info["reward/exact"], 0.0).sum(0)
        np.testing.assert_allclose(at_last, gold, rtol=1e-6)
        assert env.evaluated is ENV


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(kl_target=0.1), "kl_coef"),
        (dict(normalize_observations=True), "normalize_observations"),
        (dict(normalize_rewards=True), "normalize_rewards"),
        (dict(num_envs=6, num_minibatches=4), "num_minibatches"),
        (dict(model=None, network="mlp", kl_coef=0.1), "kl_coef"),
        (dict(model=None, value_network="separate"), "value_network"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=f"algo.{words}"):
        rljax.make_agent(config(**options), ENV)


def test_a_cut_completion_is_paid_or_bootstrapped_and_never_both(monkeypatch):
    """The flags that reach GAE: cut completions keep their bootstrap unless the environment pays for them as they stand."""
    seen = []
    whole_gae = ppo.returns.gae

    def gae(rewards, values, following, terminated, truncated, *args, **kwargs):
        seen.append((terminated, truncated))
        return whole_gae(rewards, values, following, terminated, truncated, *args, **kwargs)

    monkeypatch.setattr(ppo.returns, "gae", gae)
    for env, pays in (
        (TokenEnvironment(ENV.task), False),
        (ENV, True),
        (LearnedReward(TokenEnvironment(ENV.task), pays_one), True),
    ):
        agent = rljax.make_agent(config(), env)
        terminated, truncated = jit(lambda key, a=agent: (a.step(a.init(key)), seen.pop())[1])(jax.random.key(0))
        assert truncated.any()
        np.testing.assert_array_equal(terminated & truncated, truncated if pays else jnp.zeros_like(truncated))


def pays_one(context, lengths):
    return jnp.ones(context.shape[0])
