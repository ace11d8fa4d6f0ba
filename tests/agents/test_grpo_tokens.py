"""GRPO and SFT on tokens: exact gradients by enumeration, and each option against a loss that is written out.

Episodes are forced: the agent's own step runs on completions that the test gives it, in place of those that it would sample.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import rljax
from rljax.agents import grpo, preferences, reinforce, sft
from rljax.agents.on_policy import Episodes
from rljax.envs import Box, Discrete, restart, transition
from rljax.envs.tokens import Problem, TokenEnvironment
from rljax.lm.tasks import Calculator, Multiplication
from rljax.networks.transformer import forward
from rljax.ops import groups
from tests.agents import probes
from tests.agents.lookup import ENV, EOS, LEAVES, MODEL, A, B, Lookup, T, log_probs, padded, reward_of

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here


def forced(tokens, spoil=lambda timesteps, mask: timesteps):
    """In place of `first_episodes`: every environment says what ``tokens [T, B]`` holds for it."""

    def play(policy, envs, params, key, num_steps, **kwargs):
        state, first = envs.reset(key)

        def say(env_state, token):
            env_state, timestep = jax.vmap(envs.env.step)(jax.random.split(key, envs.num_envs), env_state, token)
            return env_state, timestep.replace(next_action_mask=timestep.action_mask)

        _, rest = jax.lax.scan(say, state.env, tokens[:num_steps])
        ended = jnp.cumsum(rest.done, 0) - rest.done
        timesteps = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), envs.without_statistics(first), rest)
        return Episodes(spoil(timesteps, ended == 0), tokens[:num_steps], ended == 0)

    return play


def config(**changes):
    plain = dict(model=MODEL, num_epochs=1, num_minibatches=1, num_groups=1, group_size=2, max_grad_norm=1e9, learning_rate=0.0)
    return grpo.Config(**{**plain, **changes})


def params_like(shapes, seed=2, scale=0.7):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), shapes)


def state_of(agent):
    """Parameters far from a uniform policy, and another policy as the reference."""
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    return shapes.replace(
        key=jax.random.key(0),
        opt_state=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.opt_state),
        params=params_like(shapes.params),
        reference=None if shapes.reference is None else params_like(shapes.reference, 3),
        kl_coef=None if shapes.kl_coef is None else jnp.float32(1.0),
    )


def stepper(monkeypatch, agent, state, spoil=lambda timesteps, mask: timesteps):
    """``tokens -> (gradient, metrics)``; the gradient is ten times what the first moment of Adam holds after one step."""

    def step(tokens):
        monkeypatch.setattr(grpo, "first_episodes", forced(tokens, spoil))
        after, metrics = agent.step(state)
        return ravel_pytree(after.opt_state[1].mu)[0] * 10.0, metrics

    return jit(step)


def close(a, b, rtol=1e-4):
    """Of gradients; relative to the largest element."""
    a, b = (np.asarray(ravel_pytree(x)[0]) for x in (a, b))
    assert np.abs(b).max() > 1e-3
    np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max())


class StartsWithB(Lookup):
    """Right is what begins with ``b``."""

    def verify(self, problem, completion, length):
        return (completion[0] == B).astype(jnp.float32)[None]


@pytest.mark.parametrize("size", [2, 5])
def test_as_many_groups_are_flat_as_chance_says(size):
    """Of G answers, each right with probability p, all are or none is in p^G + (1 - p)^G of the groups."""
    count = 2_000
    agent = grpo.make(config(num_groups=count, group_size=size), TokenEnvironment(StartsWithB(), truncated_counts=True))
    state = state_of(agent)
    p = float(jnp.exp(log_probs(state.params, jnp.array([[B]]))[0, 0]))
    share = p**size + (1 - p) ** size
    assert 0.02 < share < 0.98
    flat = float(jit(agent.step)(state)[1]["flat_groups"])
    assert abs(flat - share) < 4 * (share * (1 - share) / count) ** 0.5


# The expectation over all pairs of completions, exactly.

TEMPERATURE = 0.8


def leaf_log_probs(params):
    """``[T, leaves]``, 0 after the end."""
    tokens, mask = padded(LEAVES)
    return jnp.where(mask, log_probs(params, jnp.asarray(tokens), temperature=TEMPERATURE), 0.0)


def objective(params, reference):
    rewards = jnp.array([reward_of(seq) for seq in LEAVES])
    return (jnp.exp(leaf_log_probs(params).sum(0)) * rewards).sum()


def minus_kl(params, reference):
    """Of whole completions."""
    log_prob, ref = leaf_log_probs(params).sum(0), leaf_log_probs(reference).sum(0)
    return -(jnp.exp(log_prob) * (log_prob - ref)).sum()


def minus_step_kl(params, reference, reverse=True):
    """Of each next token, where the policy itself leads; how it gets there is not differentiated.

    The KL of a token is what is found among the completions that share what comes before it.
    """
    log_prob, ref = leaf_log_probs(params), leaf_log_probs(reference)
    visits = jax.lax.stop_gradient(jnp.exp(log_prob.sum(0)))
    total = 0.0
    for prefix in {seq[:n] for seq in LEAVES for n in range(len(seq))}:
        n = len(prefix)
        here = [i for i, seq in enumerate(LEAVES) if seq[:n] == prefix and len(seq) > n]
        share = sum(visits[i] for i in here)
        for token in (A, B, EOS):
            i = next(i for i in here if LEAVES[i][n] == token)
            p, q = (log_prob[n, i], ref[n, i]) if reverse else (ref[n, i], log_prob[n, i])
            total = total + share * jnp.exp(p) * (p - q)
    return -total


SUM = dict(aggregate="sequence-sum", temperature=TEMPERATURE)
LEASH = dict(**SUM, kl_coef=1.0)
CASES = {
    "unscaled": (dict(SUM, advantage="unscaled"), objective, 0.5),  # the mean of a pair holds the member's own return
    "leave-one-out": (dict(SUM, advantage="leave-one-out"), objective, 1.0),
    "cispo": (dict(SUM, advantage="leave-one-out", policy_loss="cispo"), objective, 1.0),
    "kl in the reward of each token": (dict(LEASH, kl_in="reward", advantage="leave-one-out"), minus_kl, 1.0),
    "kl in the reward": (dict(LEASH, kl_in="reward", kl_level="sequence", advantage="leave-one-out"), minus_kl, 1.0),
    "k2 in the loss": (dict(LEASH, kl_estimator="k2"), minus_step_kl, 1.0),
    "k3 in the loss": (dict(LEASH, kl_estimator="k3"), functools.partial(minus_step_kl, reverse=False), 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_expected_gradient_is_the_exact_one(case, monkeypatch):
    options, function, share = CASES[case]
    env = ENV if function is objective else TokenEnvironment(Lookup(scale=0.0), truncated_counts=True)
    agent = rljax.make_agent(config(**options), env)
    state = state_of(agent)
    tokens, _ = padded(LEAVES)
    pairs = np.array(list(itertools.product(range(len(LEAVES)), repeat=2)))

    def expected(reference):
        def of_pair(pair):
            monkeypatch.setattr(grpo, "first_episodes", forced(jnp.asarray(tokens)[:, pair]))
            return ravel_pytree(agent.step(state)[0].opt_state[1].mu)[0] * -10.0

        weights = jnp.exp(leaf_log_probs(state.params).sum(0))
        exact = jax.grad(function)(state.params, reference)
        return jnp.prod(weights[pairs], 1) @ jax.vmap(of_pair)(pairs), ravel_pytree(exact)[0], weights

    estimate, exact, weights = jit(expected)(params_like(state.params, 3))
    assert weights.sum() == pytest.approx(1.0, abs=1e-5)
    close(estimate / share, exact, 1e-3)


# Options against a loss that is written out.

SEQS = [(A, EOS), (B, A, B), (B, EOS), (A, B, EOS), (EOS,), (B, B, EOS), (A, A, A), (B, A, EOS)]
REWARDS = np.array([reward_of(seq) for seq in SEQS]).reshape(2, 4)
TOKENS, MASK = padded(SEQS)
STANDARD = np.asarray(groups.group_advantages(jnp.asarray(REWARDS)))
CUT = np.array([seq[-1] != EOS for seq in SEQS])
LENGTHS = np.array([len(seq) for seq in SEQS])
FOUR = dict(num_groups=2, group_size=4)


def written_out(params, tokens, advantages, mask, how="token", prompt=(-1, B), num_tokens=3):
    """Gradient of ``-A log pi``, which is that of the ratio at 1."""
    advantages = jnp.broadcast_to(jnp.asarray(advantages).reshape(-1), mask.shape)
    return _written_out(params, tokens, advantages, mask, how, prompt, num_tokens)


@functools.partial(jit, static_argnums=(4, 5, 6))
@jax.grad
def _written_out(params, tokens, advantages, mask, how, prompt, num_tokens):
    terms = jnp.where(mask, -advantages * log_probs(params, tokens, prompt, num_tokens=num_tokens), 0.0)
    per_sequence = terms.sum(0)
    sequences = (mask.sum(0) > 0).sum()
    return {
        "token": terms.sum() / mask.sum(),
        "sequence": (per_sequence / jnp.maximum(mask.sum(0), 1)).sum() / sequences,
        "sequence-sum": per_sequence.sum() / sequences,
        "constant": terms.sum() / mask.size,
    }[how]


@pytest.mark.parametrize(
    ("options", "advantages", "mask"),
    [
        (dict(aggregate="sequence"), STANDARD, MASK),
        (dict(aggregate="constant", policy_loss="gspo"), STANDARD, MASK),
        (dict(mask_truncated=True), STANDARD, MASK & ~CUT),
        (dict(overlong_steps=2, advantage="unscaled"), REWARDS - 0.5 * np.clip(LENGTHS - 1, 0, 2).reshape(2, 4), MASK),
        (dict(advantage="reinforce++"), (REWARDS - REWARDS.mean()) / REWARDS.std(ddof=1), MASK),
    ],
    ids=lambda x: ",".join(map(str, x.items())) or "plain" if isinstance(x, dict) else "",
)
def test_options_by_hand(options, advantages, mask, monkeypatch):
    if options.get("advantage") == "unscaled":
        advantages = advantages - advantages.mean(1, keepdims=True)
    agent = rljax.make_agent(config(**FOUR, **options), ENV)
    state = state_of(agent)
    gradient, _ = stepper(monkeypatch, agent, state)(TOKENS)
    close(gradient, written_out(state.params, TOKENS, advantages, mask, options.get("aggregate", "token")))


def test_an_episode_that_num_steps_cuts_is_left_out_too(monkeypatch):
    agent = rljax.make_agent(config(**FOUR, num_steps=2, mask_truncated=True, advantage="unscaled"), ENV)
    state = state_of(agent)
    gradient, _ = stepper(monkeypatch, agent, state)(TOKENS)
    rewards = np.where(LENGTHS <= 2, REWARDS.reshape(-1), 0.0).reshape(2, 4)
    mask = (MASK & (LENGTHS <= 2))[:2]
    close(gradient, written_out(state.params, TOKENS[:2], rewards - rewards.mean(1, keepdims=True), mask))


def test_oversampling_keeps_the_groups_that_differ(monkeypatch):
    """Of four groups two are kept: of the uneven ones as many as there are, then the first flat one."""
    uneven, flat = [(A, EOS), (B, EOS)], [(B, A, EOS), (B, A, EOS)]
    agent = rljax.make_agent(config(num_groups=2, oversample=2), ENV)
    state = state_of(agent)
    step = stepper(monkeypatch, agent, state)
    assert agent.env_steps == 2 * 2 * 2 * T
    for played, kept, share in (
        ([flat, uneven, flat, uneven[::-1]], [uneven, uneven[::-1]], 0.5),
        ([flat, flat, flat, uneven], [uneven, flat], 0.75),
        ([uneven, uneven, uneven[::-1], uneven], [uneven, uneven], 0.0),
    ):
        gradient, metrics = step(padded(list(itertools.chain(*played)))[0])
        assert metrics["flat_groups"] == share  # of what was played
        tokens, mask = padded(list(itertools.chain(*kept)))
        rewards = jnp.array([[reward_of(seq) for seq in group] for group in kept])
        close(gradient, written_out(state.params, tokens, groups.group_advantages(rewards), mask))


def test_rewards_that_could_not_be_had_leave_the_group_alone(monkeypatch):
    class Broken(TokenEnvironment):
        """Where the first word is ``b`` there is no reward."""

        def reset(self, key):
            state, timestep = super().reset(key)
            return state, timestep.replace(info={**timestep.info, "valid": jnp.ones((), bool)})

        def step(self, key, state, action):
            state, timestep = super().step(key, state, action)
            valid = ~timestep.done | (state.context[2] != B)
            return state, timestep.replace(
                reward=jnp.where(valid, timestep.reward, jnp.nan), info={**timestep.info, "valid": valid}
            )

    agent = rljax.make_agent(config(**FOUR, kl_coef=0.5), Broken(Lookup(), truncated_counts=True))
    state = state_of(agent).replace(kl_coef=jnp.float32(0.0))
    gradient, metrics = stepper(monkeypatch, agent, state)(TOKENS)
    valid = np.array([seq[0] != B for seq in SEQS])
    assert metrics["invalid"] == pytest.approx(0.5)
    advantages = np.zeros(8)
    for row in (0, 1):
        here = valid & (np.arange(8) // 4 == row)
        values = REWARDS.reshape(-1)[here]
        advantages[here] = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    close(gradient, written_out(state.params, TOKENS, advantages, MASK & valid))


def test_what_stands_in_masked_slots_changes_nothing(monkeypatch):
    agent = rljax.make_agent(config(**FOUR, kl_coef=0.1, entropy_coef=0.1), ENV)
    state = state_of(agent)
    plain, metrics = stepper(monkeypatch, agent, state)(TOKENS)

    def spoil(timesteps, mask):
        after = jnp.concatenate([jnp.zeros((1, 8), bool), ~mask])
        nan = jax.tree.map(
            lambda x: jnp.where(after, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            (timesteps.reward, timesteps.info),
        )
        flags = [jnp.where(after, True, x) for x in (timesteps.terminated, timesteps.truncated)]
        return timesteps.replace(reward=nan[0], info=nan[1], terminated=flags[0], truncated=flags[1])

    others = np.where(MASK, TOKENS, (TOKENS + 1) % 3)
    spoilt, spoilt_metrics = stepper(monkeypatch, agent, state, spoil)(others)
    np.testing.assert_allclose(spoilt, plain, atol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(spoilt_metrics[name], value, atol=1e-6, err_msg=name)


class BreaksAfterTheEnd:
    """One or two steps; whoever goes on after the end sees and earns NaN."""

    observation_space, action_space = Box(-1.0, 1.0, (2,)), Discrete(2)

    def reset(self, key):
        state = jnp.stack([jax.random.randint(key, (), 1, 3), 0])
        return state, restart(state.astype(jnp.float32))

    def step(self, key, state, action):
        state = state + jnp.array([0, 1])
        is_over = state[1] > state[0]
        observation = jnp.where(is_over, jnp.nan, state.astype(jnp.float32))
        return state, transition(observation, jnp.where(is_over, jnp.nan, action), terminated=state[1] == state[0])


@pytest.mark.parametrize(
    "config",
    [
        grpo.Config(num_groups=4, group_size=4, num_minibatches=2, num_steps=4, hidden=(4,), kl_coef=0.1),
        *(reinforce.Config(num_envs=16, num_steps=4, hidden=(4,), baseline=b, entropy_coef=0.1) for b in ("mean", "value")),
    ],
    ids=["grpo", "reinforce, mean", "reinforce, value"],
)
def test_nan_after_the_end_of_an_episode_reaches_no_parameter(config):
    agent = rljax.make_agent(config, BreaksAfterTheEnd())
    state, metrics = jit(lambda key: agent.step(agent.init(key)))(jax.random.key(0))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(metrics))


# Tools


@dataclasses.dataclass(frozen=True)
class OneQuestion(Multiplication):
    """Always 3 times 4."""

    def sample(self, key):
        return Problem(jnp.asarray(self.tokenizer.encode("3*4?"), jnp.int32), jnp.asarray(self.tokenizer.encode("12"), jnp.int32))


def test_tokens_of_a_tool_have_no_gradient(monkeypatch):
    task = OneQuestion(digits=1)
    env = TokenEnvironment(task, tool=Calculator(task), weights={"called": 0.0})
    agent = rljax.make_agent(config(num_groups=1, group_size=4), env)
    state = state_of(agent)
    texts = ["[3*4](12)=12$", "[3*3](9)=9$", "=12$", "[](?)=1$"]
    ids = [[task.tokenizer.encode(c)[0] if c != "$" else task.tokenizer.eos_ids[0] for c in text] for text in texts]
    tokens, mask = padded(ids, env.max_tokens)
    for i, text in enumerate(texts):
        for place in range(text.find("("), text.find(")") + 1):
            if "(" in text:
                mask[place, i] = False
    gradient, metrics = stepper(monkeypatch, agent, state)(tokens)
    advantages = groups.group_advantages(jnp.array([[1.0, 0.0, 1.0, 0.0]]))
    exact = written_out(
        state.params, tokens, advantages, mask, prompt=tuple(task.tokenizer.encode("3*4?")), num_tokens=task.tokenizer.vocab_size
    )
    close(gradient, exact)
    assert float(metrics["episode/length"][0]) == sum(map(len, texts))


# What is sampled


def test_before_the_first_update_the_ratio_is_one_and_the_kl_zero():
    options = dict(num_groups=4, group_size=4, temperature=0.7, top_k=2, top_p=0.9, kl_coef=0.1, learning_rate=0.05)
    for one_step, sizes in ((True, {}), (False, dict(num_epochs=2, num_minibatches=2))):
        agent = rljax.make_agent(config(**options, **sizes), ENV)
        state = state_of(agent)
        state = state.replace(reference=state.params)  # as `init` makes it, also from parameters that were trained before
        after, first = jit(agent.step)(state)
        assert first["ratio_error"] == 0.0 if one_step else first["ratio_error"] < 1e-5
        for name in ("kl_reference/k1", "kl_reference/k2", "kl_reference/k3", "kl_reference/episode"):
            assert first[name] == 0.0, name
        _, second = jit(agent.step)(after)
        assert second["kl_reference/k3"] > 1e-6 and second["ratio_error"] < 1e-5
        assert one_step or second["kl"] > 0
        given = agent.init(jax.random.key(1), params=after.params)
        jax.tree.map(np.testing.assert_array_equal, (given.params, given.reference), (after.params, after.params))


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_microbatches_are_the_whole_batch(aggregate):
    options = dict(num_groups=8, group_size=2, num_minibatches=2, aggregate=aggregate, kl_coef=0.3, entropy_coef=0.1)
    results = []
    for parts in (1, 4):
        agent = rljax.make_agent(config(**options, num_microbatches=parts, learning_rate=1e-3), ENV)
        after, metrics = jit(agent.step)(state_of(agent))
        results.append((ravel_pytree(after.opt_state[1].mu)[0], ravel_pytree(after.params)[0], metrics))
    for a, b in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.abs(results[0][0]).max() > 1e-3
    for name, value in results[0][2].items():
        np.testing.assert_allclose(results[1][2][name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        dict(policy_loss="gspo", aggregate="sequence", clip_low=0.05, clip_high=0.1),
        dict(dual_clip=2.0, clip_high=0.3, advantage="reinforce++-baseline", aggregate="constant"),
    ],
    ids=["gspo", "dual_clip"],
)
def test_relatives_of_grpo_learn(options):
    agent = rljax.make_agent(
        config(**options, num_groups=8, group_size=8, num_epochs=2, num_minibatches=2, learning_rate=0.02, max_grad_norm=1.0), ENV
    )

    def program(state):
        state, metrics = jax.lax.scan(lambda s, _: agent.step(s), state, length=40)
        returns = metrics["episode/return"]
        return returns[0] / returns[1], metrics["clip_fraction"]

    returns, clipped = jit(program)(state_of(agent))
    best = max(map(reward_of, LEAVES))
    assert returns[0] < 0.6 * best < 0.9 * best < returns[-5:].mean()
    assert clipped.max() > 0


def test_share_of_flat_groups_is_that_of_coin_throws():
    agent = rljax.make_agent(grpo.Config(num_groups=4096, group_size=4, num_steps=1, hidden=(4,), learning_rate=0.0,
                                         num_epochs=1, num_minibatches=1), probes.ActionReward())  # fmt: skip

    def program(bias):
        state = agent.init(jax.random.key(0))
        params = dict(state.params)
        head = next(name for name in params if name.startswith("Dense"))
        params[head] = {**params[head], "bias": jnp.stack([0.0, bias])}
        _, metrics = agent.step(state.replace(params=params))
        total, count = metrics["episode/return"]
        return metrics["flat_groups"], total / count

    for bias in (0.0, 1.0, -2.5):
        p = 1 / (1 + np.exp(-bias))
        flat, mean = jit(program)(bias)
        expected = p**4 + (1 - p) ** 4
        assert abs(flat - expected) < 4 * np.sqrt(expected * (1 - expected) / 4096)
        assert abs((mean + 1) / 2 - p) < 4 * np.sqrt(p * (1 - p) / 16384)


def test_the_leash_is_steered_to_its_target(monkeypatch):
    def swapped(agent):  # these completions are more likely under the one than under the other
        state = state_of(agent)
        return state.replace(params=state.reference, reference=state.params)

    def after(target):
        agent = rljax.make_agent(config(**FOUR, kl_coef=1.0, kl_target=target, kl_horizon=100.0), ENV)
        monkeypatch.setattr(grpo, "first_episodes", forced(jnp.asarray(TOKENS)))
        state, metrics = agent.step(swapped(agent))
        return state.kl_coef, metrics["kl_coef"], metrics["kl_reference/episode"]

    coefficients, used, measured = jit(jax.vmap(after))(jnp.array([1e-3, 1e3]))
    agent = rljax.make_agent(config(kl_coef=1.0), ENV)
    state = swapped(agent)
    tokens = jnp.asarray(TOKENS)
    d = jnp.where(MASK, log_probs(state.params, tokens) - log_probs(state.reference, tokens), 0.0).sum(0).mean()
    np.testing.assert_allclose(measured, [d, d], rtol=1e-4)
    assert d > 2e-3
    np.testing.assert_allclose(used, 1.0)
    np.testing.assert_allclose(coefficients, [1 + 0.2 * 8 / 100, 1 - 0.2 * 8 / 100], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(kl_coef=0.1, kl_estimator="k1"), 'algo.kl_estimator "k1" in the loss has a gradient of zero on average'),
        (dict(kl_target=1.0), r"algo\.kl_target steers algo\.kl_coef"),
        (dict(num_groups=4, num_minibatches=3), r"algo\.num_minibatches \(3\) must divide the 4 groups"),
        (dict(num_groups=4, num_minibatches=2, num_microbatches=4), r"algo\.num_microbatches \(4\) must divide the 2 groups"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_reason(options, words):
    with pytest.raises(ValueError, match=words):
        rljax.make_agent(config(**options), ENV)
    rljax.make_agent(config(kl_coef=0.1, kl_estimator="k1", kl_in="reward"), ENV)


# Supervised fine-tuning


def test_fine_tuning_counts_the_words_of_the_policy_and_its_end():
    env = rljax.make_env("tokens/multiplication", digits=1, tool_share=0.5)
    agent = rljax.make_agent(sft.Config(batch_size=6, model=MODEL, max_grad_norm=1e9), env)
    state = jit(agent.init)(jax.random.key(0))
    params = params_like(state.params)
    state = state.replace(params=params)
    (after, metrics), (timesteps, actions, _) = jit(
        lambda state: (agent.step(state), jax.vmap(env.demonstration)(jax.random.split(jax.random.split(state.key)[1], 6)))
    )(state)
    contexts = np.asarray(timesteps.observation[:, 0])
    tokens, end = np.asarray(actions), env.tokenizer.eos_ids[0]
    mask = np.zeros(tokens.shape, bool)
    for row, said in zip(mask, tokens, strict=True):
        length = int(np.argmax(said == end)) + 1
        text = env.tokenizer.decode(said[: length - 1])
        row[:length] = True
        if "(" in text:
            row[text.index("(") : text.index(")") + 1] = False
    assert 0 < sum("(" in env.tokenizer.decode(row) for row in tokens) < 6

    def nll(params):
        prompt = env.observation_space.prompt
        rows = jnp.concatenate([contexts[:, :prompt], tokens], 1)
        logits = forward(MODEL, params, rows)[:, prompt - 1 : -1] @ params["embed"].T
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
        return jnp.where(mask, -log_prob, 0.0).sum() / mask.sum()

    value, gradient = jit(jax.value_and_grad(nll))(params)
    assert float(metrics["loss/nll"]) == pytest.approx(float(value), rel=1e-5)
    assert float(metrics["length"]) == pytest.approx(mask.sum(1).mean())
    close(jax.tree.map(lambda x: 10.0 * x, after.opt_state[1].mu), gradient)


def test_fine_tuning_learns_to_answer_and_to_stop():
    env = rljax.make_env("tokens/reversing", length=1)
    agent = rljax.make_agent(sft.Config(batch_size=32, model=MODEL, learning_rate=2e-2), env)

    def program(key):
        state, metrics = jax.lax.scan(lambda s, _: agent.step(s), agent.init(key), length=150)
        evaluation = rljax.experiment.evaluate_agent(agent, env, state, key, 64, 5)
        return metrics["loss/nll"], evaluation

    nll, evaluation = jit(program)(jax.random.key(0))
    assert nll[0] > 2.0 and nll[-1] < 0.1
    assert evaluation.returns.mean() > 0.9 and evaluation.finished.all()


def test_fine_tuning_on_a_few_demonstrations_sees_no_others():
    env = rljax.make_env("tokens/addition", digits=3)
    agent = rljax.make_agent(sft.Config(batch_size=8, model=MODEL, num_examples=3, learning_rate=1e-2), env)

    def program(key):
        return jax.lax.scan(lambda s, _: agent.step(s), agent.init(key), length=200)

    state, metrics = jit(program)(jax.random.key(0))
    assert metrics["loss/nll"][-1] < 0.1  # a million sums are not learnt in 200 steps; three are
    keys = jax.vmap(lambda i: jax.random.fold_in(state.examples, i))(jnp.arange(3))
    _, answers, mask = jax.vmap(env.demonstration)(keys)
    lengths = set(np.asarray(mask.sum(1)).tolist())
    assert len(np.unique(np.asarray(answers), axis=0)) == 3
    assert min(lengths) <= float(metrics["length"].min()) and float(metrics["length"].max()) <= max(lengths)


def test_fine_tuning_on_own_answers_takes_those_that_are_paid_enough():
    env = rljax.make_env("tokens/running_sum", terms=2, process=1.0, truncated_counts=True)
    warm = rljax.make_agent(sft.Config(batch_size=64, model=MODEL, learning_rate=1e-2), env)
    start = jit(lambda key: jax.lax.scan(lambda s, _: warm.step(s), warm.init(key), length=40)[0].params)(jax.random.key(0))

    def agent_of(**options):
        return rljax.make_agent(sft.Config(batch_size=16, model=MODEL, demonstrations="own", num_examples=300, **options), env)

    agent = agent_of(min_reward=2.0, learning_rate=1e-2)
    state = jit(lambda key: agent.init(key, None, start))(jax.random.key(1))
    own = state.examples.completions
    problems = [env.tokenizer.decode([i for i in row if i >= 0]) for row in np.asarray(own.context)]
    right = []
    for text in problems:
        question, _, answer = text.partition("=")
        a, b = map(int, question.split("+"))
        right.append(answer == f"{a}{(a + b) % 10}")
    # Answers that ran to the limit count as they stand, right ones ended before it.
    np.testing.assert_array_equal(np.asarray(state.examples.counts), right)
    assert 0 < sum(right) < 300
    (after, metrics) = jit(lambda s: jax.lax.scan(lambda s, _: agent.step(s), s, length=60))(state)
    np.testing.assert_allclose(metrics["kept"], np.mean(right), rtol=1e-6)
    assert metrics["loss/nll"][-1] < 0.5 * metrics["loss/nll"][0]
    log_prob, _ = jit(lambda p: preferences.log_probs(agent.policy, p, own))(after.params)
    log_prob = np.asarray(log_prob.sum(0))
    assert log_prob[right].mean() > log_prob[~np.array(right)].mean() + 1.0

    nothing = agent_of(min_reward=99.0)
    state = jit(lambda key: nothing.init(key, None, start))(jax.random.key(1))
    after, metrics = jit(nothing.step)(state)
    close(after.params, state.params)
    assert metrics["kept"] == 0.0 and metrics["loss/nll"] == 0.0


def test_examples_that_cannot_be_had_are_refused():
    env = rljax.make_env("tokens/addition")
    with pytest.raises(ValueError, match=r'algo\.demonstrations "own" needs algo\.num_examples'):
        rljax.make_agent(sft.Config(model=MODEL, demonstrations="own"), env)
