"""Pairs, DPO's family and reward models, on a language small enough to write every probability down."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import dpo, reward_model
from rljax.agents.preferences import Completions, Pairs, collect_pairs
from rljax.agents.preferences import log_probs as words_of
from rljax.envs.tokens import TokenEnvironment
from rljax.experiment import evaluate_agent
from rljax.networks import Transformer, transformer
from rljax.networks.reward import reward_model as reward_network
from rljax.networks.transformer import forward
from rljax.ops import losses
from tests.agents.lookup import ENV, EOS, MODEL, Lookup, T, log_probs, padded, reward_of
from tests.agents.test_grpo_tokens import params_like

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is all that costs here
SPACE = ENV.observation_space
POLICY = transformer(MODEL, SPACE)


def some_params(seed=2, **kwargs):
    return params_like(
        jax.eval_shape(lambda: POLICY.init(jax.random.key(0), jax.vmap(ENV.reset)(jax.random.key(0)[None])[1])), seed
    )


def said(completions, i):
    return tuple(int(token) for token in completions.said[i] if token >= 0)


def contexts_of(seqs):
    context = np.full((len(seqs), SPACE.length), -1, np.int32)
    context[:, 1] = 1  # the prompt is "b"
    for i, seq in enumerate(seqs):
        context[i, 2 : 2 + len(seq)] = seq
    context = jnp.asarray(context)
    return Completions(context, context[:, 2:] >= 0)


def sums_by_hand(params, seqs):
    tokens, mask = padded(seqs)
    return np.where(mask, log_probs(params, jnp.asarray(tokens)), 0.0).sum(0)


def test_the_best_and_the_worst_of_a_sample_are_a_pair():
    pairs = jit(lambda: collect_pairs(ENV, MODEL, some_params(), jax.random.key(0), 300, 4, 0.0))()
    assert pairs.chosen.context.shape == (300, SPACE.length)
    counted = 0
    for i in range(300):
        better, worse = reward_of(said(pairs.chosen, i)), reward_of(said(pairs.rejected, i))
        assert float(pairs.margin[i]) == pytest.approx(better - worse, abs=1e-5)
        assert bool(pairs.counts[i]) == (better > worse)
        counted += better > worse
    assert 200 < counted <= 300


def test_labels_are_turned_around_as_often_as_asked():
    noisy = jit(lambda noise: collect_pairs(ENV, MODEL, some_params(), jax.random.key(0), 400, 4, noise))
    clean, some, every = noisy(0.0), noisy(0.25), noisy(1.0)
    np.testing.assert_array_equal(every.chosen.context, clean.rejected.context)
    turned = np.any(some.chosen.context != clean.chosen.context, 1)[np.asarray(clean.counts)]
    assert turned.mean() == pytest.approx(0.25, abs=0.08)


def test_log_probs_of_completions_are_the_models():
    seqs = [(0, EOS), (1, 1, 0), (EOS,), (0, 0, EOS)]
    params = some_params()
    words, entropy = jit(lambda p, c: words_of(POLICY, p, c))(params, contexts_of(seqs))
    np.testing.assert_allclose(words.sum(0), sums_by_hand(params, seqs), rtol=1e-5)
    assert np.all(np.asarray(entropy)[np.asarray(contexts_of(seqs).mask.T)] > 0)


PAIRS = [((0, EOS), (1, 1, 0)), ((EOS,), (0, 0, EOS)), ((1, EOS), (0, EOS)), ((0, 1, 0), (1, EOS))]


@pytest.mark.parametrize("loss", dpo.LOSSES)
def test_losses_by_hand(loss, monkeypatch):
    """Four pairs, of which the last does not count, against each loss written out of log-probabilities by another way."""
    chosen, rejected = zip(*PAIRS, strict=True)
    counts = jnp.asarray([True, True, True, False])
    pairs = Pairs(contexts_of(chosen), contexts_of(rejected), jnp.ones(4), counts)
    monkeypatch.setattr(dpo, "collect_pairs", lambda *args: pairs)
    monkeypatch.setattr(jax.random, "randint", lambda key, shape, low, high: jnp.arange(4) if shape == (4,) else 1 / 0)
    smoothing = 0.1 if loss in ("sigmoid", "robust") else 0.0
    config = dpo.Config(
        loss=loss, beta=0.7, smoothing=smoothing, gamma=0.3, odds_coef=0.4, desirable_weight=1.5, num_pairs=4, batch_size=4,
        model=MODEL,
    )  # fmt: skip
    agent = rljax.make_agent(config, ENV)
    start, now = some_params(2), some_params(3)
    state = jit(lambda key: agent.init(key, params=start))(jax.random.key(0))
    _, metrics = jit(agent.step)(state.replace(params=now))
    sums = {name: [sums_by_hand(p, side) for side in (chosen, rejected)] for name, p in (("now", now), ("start", start))}
    sizes = [np.array([len(seq) for seq in side]) for side in (chosen, rejected)]
    gain, pain = (sums["now"][i] - sums["start"][i] for i in (0, 1))
    mean = [sums["now"][i] / sizes[i] for i in (0, 1)]
    if loss == "kto":
        after = [chosen[(i + 1) % 4] for i in range(4)]
        z = max(0.0, float((sums_by_hand(now, after) - sums_by_hand(start, after))[:3].mean()))
        s = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
        value = 1.5 * (1 - s(0.7 * (gain - z))) + 1.0 * (1 - s(0.7 * (z - pain)))
    elif loss == "orpo":
        odds = [m - np.log1p(-np.exp(m)) for m in mean]
        value = -mean[0] + 0.4 * np.log1p(np.exp(-(odds[0] - odds[1])))
    elif loss == "simpo":
        value = np.log1p(np.exp(-(0.7 * (mean[0] - mean[1]) - 0.3)))
    elif loss == "ipo":
        value = (gain / sizes[0] - pain / sizes[1] - 1 / 1.4) ** 2
    else:
        value = np.asarray(losses.dpo_loss(jnp.asarray(gain - pain), 0.7, loss, smoothing))
    total, count = metrics["loss/preference"]
    assert int(count) == 3
    assert float(total) == pytest.approx(float(value[:3].sum()), rel=1e-4)
    better, worse = mean if loss in ("orpo", "simpo") else (gain, pain)
    assert float(metrics["implicit_reward/margin"][0]) == pytest.approx(0.7 * float((better - worse)[:3].sum()), rel=1e-4)
    assert int(metrics["implicit_reward/accuracy"][0]) == int((better > worse)[:3].sum())


IN_CI = ("sigmoid", "kto", "simpo")


@pytest.mark.parametrize(
    ("loss", "seeds"),
    [*((x, 1) for x in IN_CI), *(pytest.param(x, 5, marks=pytest.mark.slow) for x in dpo.LOSSES)],
)
def test_the_family_learns_what_is_preferred(loss, seeds):
    """A separable task: more of ``a`` is better. The implicit reward ranks more than nine pairs in ten right."""
    env = TokenEnvironment(CountsA(), truncated_counts=True)
    model = Transformer(layers=1, width=32, heads=2, mlp=64)
    config = dpo.Config(
        loss=loss, learning_rate=2e-3, num_pairs=256, batch_size=64, answers=4, beta=0.5, odds_coef=1.0, model=model
    )
    agent = rljax.make_agent(config, env)

    @jax.jit
    @jax.vmap
    def train(seed):
        key = jax.random.key(seed)
        state, metrics = jax.lax.scan(lambda state, _: agent.step(state), agent.init(key), length=200)
        before = evaluate_agent(agent, env, agent.init(key), jax.random.key(7), 64, 10, greedy=False)
        after = evaluate_agent(agent, env, state, jax.random.key(7), 64, 10, greedy=False)
        return metrics, before.returns.mean(), after.returns.mean()

    metrics, before, after = train(jnp.arange(seeds))
    right, count = (x[:, -20:].sum(1) for x in metrics["implicit_reward/accuracy"])
    print(
        f"{loss}: implicit accuracy {np.round(right / count, 3)}, return {np.round(before, 2)} before, {np.round(after, 2)} after"
    )
    assert np.all(np.asarray(right / count) > 0.9)
    assert np.all(np.asarray(after) > np.asarray(before) + 0.3)


@dataclasses.dataclass(frozen=True)
class CountsA(Lookup):
    """Pays for each ``a`` among at most three tokens."""

    def verify(self, problem, completion, length):
        return jnp.sum(jnp.where(jnp.arange(completion.shape[0]) < length, completion == 0, False)).astype(jnp.float32)[None]


def reward_config(**changes):
    model = Transformer(layers=1, width=32, heads=2, mlp=64)
    plain = dict(num_pairs=256, num_heldout=128, batch_size=64, answers=4, learning_rate=3e-3, model=model)
    return reward_model.Config(**{**plain, **changes})


@pytest.mark.parametrize(
    "options", [{}, dict(level="token"), pytest.param(dict(ensemble=3, pays="lowest"), marks=pytest.mark.slow)], ids=str
)
def test_a_reward_model_ranks_what_it_has_not_seen(options):
    env = TokenEnvironment(CountsA(), truncated_counts=True)
    agent = rljax.make_agent(reward_config(**options), env)

    @jax.jit
    def train(key):
        state, metrics = jax.lax.scan(lambda state, _: agent.step(state), agent.init(key), length=150)
        return state, metrics, evaluate_agent(agent, env, state, jax.random.key(1), 128, 1).returns

    state, metrics, heldout = train(jax.random.key(0))
    assert np.nanmean(heldout) > 0.95
    right, count = (x[-20:].sum() for x in metrics["heldout/accuracy"])
    assert float(right / count) > 0.95
    assert float(metrics["heldout/calibration_error"][0][-1]) < float(metrics["heldout/calibration_error"][1][-1]) * 0.2
    assert (float(metrics["heldout/disagreement"][0][-1]) > 0) == ("ensemble" in options)
    network = reward_model.of_config(reward_config(**options), SPACE)
    completions = contexts_of([(0, 0, 0), (0, 1, EOS), (1, EOS)])
    scores = jit(network.scores)(state.params, completions.context, completions.lengths)
    assert np.all(np.diff(np.asarray(scores.mean(0))) < 0)


def test_margin_and_centring_enter_the_loss(monkeypatch):
    chosen, rejected = zip(*PAIRS, strict=True)
    margin, counts = jnp.asarray([0.5, 1.0, 2.0, 4.0]), jnp.asarray([True, True, True, False])
    pairs = Pairs(contexts_of(chosen), contexts_of(rejected), margin, counts)
    monkeypatch.setattr(reward_model, "collect_pairs", lambda *args: jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), pairs))
    monkeypatch.setattr(jax.random, "randint", lambda key, shape, low, high: jnp.broadcast_to(jnp.arange(4), shape) % high)
    config = reward_model.Config(model=MODEL, num_pairs=4, num_heldout=1, batch_size=4, margin_coef=0.6, centring=0.2)
    agent = rljax.make_agent(config, ENV)
    state = jit(agent.init)(jax.random.key(0))
    state = state.replace(params=params_like(state.params))
    _, metrics = jit(agent.step)(state)
    network = reward_model.of_config(config, SPACE)
    scores = jit(network.scores)
    better, worse = (scores(state.params, s.context, s.lengths)[0] for s in (pairs.chosen, pairs.rejected))
    by_hand = jnp.log1p(jnp.exp(-(better - worse - 0.6 * margin))) + 0.2 * (better + worse) ** 2
    assert float(metrics["loss/preference"]) == pytest.approx(float(by_hand[:3].mean()), rel=1e-4)


def test_the_score_is_read_at_the_last_token_that_was_said():
    """What stands behind the end changes nothing, and a score is the head on the hidden state of the last token."""
    network = reward_network(MODEL, SPACE)
    params = jax.tree.map(
        lambda x: x[None], params_like(jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], network.init(jax.random.key(0)))))
    )
    seqs = [(0, EOS), (1, 0, EOS), (EOS,), (1, 1, 1)]
    completions = contexts_of(seqs)
    scores = jit(network.scores)(params, completions.context, completions.lengths)[0]
    one = jax.tree.map(lambda x: x[0], params)
    for i, seq in enumerate(seqs):
        hidden = jit(lambda params, tokens: forward(MODEL, params, tokens))(one, jnp.asarray([[1, *seq]]))[0, -1]
        by_hand = hidden @ one["value"]["kernel"][:, 0] + one["value"]["bias"][0]
        assert float(scores[i]) == pytest.approx(float(by_hand), rel=1e-4, abs=1e-5)
    spoilt = jnp.where(completions.context < 0, 1, completions.context).at[:, 0].set(-1)
    np.testing.assert_allclose(jit(network.scores)(params, spoilt, completions.lengths)[0], scores, rtol=1e-5)


def test_rewards_of_tokens_add_up_to_the_score_and_the_lowest_member_pays():
    for of_tokens in (False, True):
        network = reward_network(MODEL, SPACE, ensemble=3, of_tokens=of_tokens, pessimistic=True)
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        params = params_like(shapes)
        completions = contexts_of([(0, EOS), (1, 0, EOS), (EOS,), (1, 1, 1)])
        scores = jit(network.scores)(params, completions.context, completions.lengths)
        paid = jit(network.pays)(params, completions.context, completions.lengths)
        assert paid.shape == ((T, 4) if of_tokens else (4,))
        np.testing.assert_allclose(paid.sum(0) if of_tokens else paid, scores.min(0), rtol=1e-5)


def test_calibration_by_hand():
    """Two bins: confidence 0.75 with one right of two, and 0.9 with all three right; one pair does not count."""
    odds = np.log(np.array([3.0, 3.0, 9.0, 9.0, 9.0, 9.0]))
    difference = odds * np.array([1, -1, 1, 1, 1, -1])
    counts = jnp.asarray([True] * 5 + [False])
    quality = reward_model.quality(jnp.asarray(difference, jnp.float32)[None], jnp.zeros((1, 6)), counts)
    total, count = quality["calibration_error"]
    assert float(total / count) == pytest.approx(2 / 5 * 0.25 + 3 / 5 * 0.1, rel=1e-4)
    assert float(quality["accuracy"][0] / count) == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dpo.Config(model=MODEL, loss="ipo", smoothing=0.1), "algo.smoothing"),
        (dpo.Config(model=MODEL), "algo.name dpo needs an environment of tokens"),
        (reward_model.Config(model=MODEL), "algo.name reward_model needs an environment of tokens"),
    ],
)
def test_what_does_not_fit_is_refused(config, words):
    env = ENV if "smoothing" in words else rljax.make_env("CartPole-v1")
    with pytest.raises(ValueError, match=words):
        rljax.make_agent(config, env)
