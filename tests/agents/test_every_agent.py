"""What every agent must do: solve the probes that it can, resume bit for bit, keep its types, draw afresh at every step."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax
from rljax.agents import (
    AGENTS,
    a2c,
    bc,
    c51,
    cql,
    decision_transformer,
    dpo,
    dqn,
    epsilon_greedy,
    grpo,
    iql,
    linucb,
    neural_linear,
    ppo,
    pqn,
    reinforce,
    reward_model,
    sac,
    sft,
    td3,
    td3_bc,
    thompson,
)
from rljax.envs import Box, Discrete, restart
from rljax.experiment import evaluate_agent
from rljax.networks import Transformer, actor_critic
from rljax.ops import replay
from rljax.ops.dataset import make_dataset
from tests.agents import probes

# Where compiling is all that costs.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

OFF_POLICY = dict(
    hidden=(32,), learning_rate=5e-3, discount=0.5, num_envs=8, num_steps=16, batch_size=64, buffer_size=1024, learning_starts=64
)
Q_LEARNING = dict(anneal_steps=2000.0, exploration_fraction=0.5, target_every=10, **OFF_POLICY)
OFFLINE = dict(hidden=(8,), batch_size=16, num_updates=4)
BANDIT = dict(num_envs=4, num_steps=16)
TRANSFORMER = Transformer(layers=1, width=8, heads=2, mlp=16)
SMALL = {
    "reinforce": reinforce.Config(num_envs=32, num_steps=4, hidden=(32,), learning_rate=1e-2, discount=0.5),
    "a2c": a2c.Config(num_envs=32, num_steps=4, hidden=(32,), learning_rate=5e-3, discount=0.5, optimizer="adam"),
    "ppo": ppo.Config(num_envs=16, num_steps=16, hidden=(32,), learning_rate=5e-3, entropy_coef=0.0, discount=0.5),
    "grpo": grpo.Config(num_groups=4, group_size=8, num_steps=4, hidden=(32,), learning_rate=5e-3),
    "pqn": pqn.Config(
        num_envs=32, num_steps=8, num_minibatches=4, hidden=(32,), learning_rate=5e-2, discount=0.5, anneal_steps=40_000.0
    ),
    "dqn": dqn.Config(**Q_LEARNING),
    "c51": c51.Config(**Q_LEARNING, value_min=-2.0, value_max=3.0, num_atoms=26),
    "sac": sac.Config(**OFF_POLICY, target_tau=0.05, initial_temperature=0.1),
    "td3": td3.Config(**OFF_POLICY, target_tau=0.05),
    "bc": bc.Config(best=0.5, **OFFLINE),
    "iql": iql.Config(**OFFLINE),
    "cql": cql.Config(**OFFLINE),
    "td3_bc": td3_bc.Config(**OFFLINE),
    "decision_transformer": decision_transformer.Config(context=3, batch_size=4, num_updates=4, model=TRANSFORMER),
    "sft": sft.Config(batch_size=8, model=TRANSFORMER),
    "grpo of tokens": grpo.Config(num_groups=4, group_size=4, num_minibatches=2, kl_coef=0.1, model=TRANSFORMER),
    "ppo of tokens": ppo.Config(num_envs=8, num_minibatches=2, num_epochs=2, kl_coef=0.1, model=TRANSFORMER),
    "dpo": dpo.Config(num_pairs=32, batch_size=8, answers=4, model=TRANSFORMER),
    "linucb": linucb.Config(alpha=3.0, **BANDIT),
    "thompson": thompson.Config(**BANDIT),
    "epsilon_greedy": epsilon_greedy.Config(epsilon=0.1, **BANDIT),
    "neural_linear": neural_linear.Config(hidden=(8, 8), buffer_size=64, num_updates=4, **BANDIT),
    "reward_model": reward_model.Config(num_pairs=32, num_heldout=8, batch_size=8, answers=4, ensemble=2, model=TRANSFORMER),
}
RECORDED = ("bc", "iql", "cql", "td3_bc", "decision_transformer")
TOKENS = ("sft", "grpo of tokens", "ppo of tokens", "dpo", "reward_model")
EVERY = tuple(SMALL)
UPDATES = {"reinforce": 100, "a2c": 150, "grpo": 150, "pqn": 150}  # calls of step; the others get 60
VALUE_BASED = ("a2c", "ppo", "pqn", "dqn", "c51", "sac")
DISCRETE = tuple(name for name in SMALL if name not in ("td3", *RECORDED, *TOKENS))
MASKS = DISCRETE
CONTINUOUS = ("reinforce", "a2c", "ppo", "grpo", "sac", "td3")


def train(name, env, seed=0, **changes):
    config = dataclasses.replace(SMALL[name], **changes)
    agent = rljax.make_agent(config, env)

    @jax.jit
    def program(key):
        return jax.lax.scan(lambda state, _: agent.step(state), agent.init(key), length=UPDATES.get(name, 60))

    state, metrics = program(jax.random.key(seed))
    return agent, state, metrics


def greedy_return(agent, env, state, episodes=64):
    evaluation = jax.jit(lambda s: evaluate_agent(agent, env, s, jax.random.key(7), episodes, 100))(state)
    assert evaluation.finished.all()
    return float(evaluation.returns.mean())


def value_of(name, env, state, observation):
    """V of an observation; of a Q-function, the value of its best action."""
    config, observation = SMALL[name], jnp.asarray(observation, jnp.float32)
    if name in ("a2c", "ppo"):
        timestep = jax.tree.map(lambda x: x[None], restart(observation))
        policy = actor_critic(env.observation_space, env.action_space, config.network, config.hidden, config.activation)
        return float(policy.step(state.params, (), timestep)[1].value[0])
    network = rljax.networks.action_values(
        env.observation_space,
        env.action_space,
        config.network,
        config.hidden,
        config.activation,
        atoms=config.num_atoms if name == "c51" else None,
        layer_norm=name == "pqn",
    )
    params = state.params["critics"] if name == "sac" else [state.params]
    outputs = jnp.stack([network.apply(p, observation[None])[0] for p in params]).min(0)
    if name == "c51":
        outputs = jax.nn.softmax(outputs) @ jnp.linspace(config.value_min, config.value_max, config.num_atoms)
    return float(outputs.max())


VALUES = (
    (probes.ConstantReward(), {(0.0,): 1.0}),
    (probes.RewardFromObservation(), {(-1.0,): -1.0, (1.0,): 1.0}),
    (probes.TwoStepCredit(), {(0.0,): 0.5, (1.0,): 1.0}),
    (probes.EndlessReward(), {(0.0,): 2.0}),  # only if a cut keeps its bootstrap
)


@pytest.mark.parametrize("name", VALUE_BASED)
def test_values_of_probes(name):
    """All in one program: an agent's lanes are its probes."""
    envs = tuple(env for env, _ in VALUES)
    states = jax.jit(jax.vmap(lambda which: train(name, probes.OneOf(envs, which))[1]))(jnp.arange(len(envs)))
    for i, (env, values) in enumerate(VALUES):
        state = jax.tree.map(lambda x, i=i: x[i], states)
        for observation, value in values.items():
            assert value_of(name, env, state, observation) == pytest.approx(value, abs=0.1), type(env).__name__


@pytest.mark.parametrize("name", DISCRETE)
def test_actions_of_probes(name):
    envs = (probes.ActionReward(), probes.ActionMatchesObservation())

    @jax.jit
    @jax.vmap
    def play(which):
        env = probes.OneOf(envs, which)
        agent, state, _ = train(name, env)
        return evaluate_agent(agent, env, state, jax.random.key(7), 64, 100)

    evaluation = play(jnp.arange(2))
    assert evaluation.finished.all()
    np.testing.assert_array_equal(evaluation.returns, 1.0)


@pytest.mark.parametrize("name", MASKS)
def test_illegal_actions_are_never_taken_and_legal_ones_are_learned(name):
    env = probes.MaskedBandit()
    agent, state, metrics = train(name, env)
    total, count = metrics["episode/return"]
    assert float(total.sum() / count.sum()) > 0  # one illegal action costs 100
    assert greedy_return(agent, env, state, episodes=512) == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_actions(name):
    env = probes.ContinuousTarget()
    # At 2e-2 the deviation of GRPO and PPO goes to 0 within thirty updates, and what is then made of equal rewards throws them
    # off, PPO in two of three seeds; at 1e-2, in none of 24.
    changes = {"learning_rate": 1e-2 if name in ("grpo", "ppo") else 2e-2} if name in ("reinforce", "a2c", "ppo", "grpo") else {}
    agent, state, _ = train(name, env, **changes)
    assert greedy_return(agent, env, state) > -0.1


def env_of(name):
    """Short episodes, so that a few updates see resets and truncations."""
    if name in TOKENS:
        return rljax.make_env("tokens/multiplication", digits=1, truncated_counts=True, called=1.0)
    env = (
        "Pendulum-v1" if name in ("td3", "td3_bc", "grpo") else "CartPole-v1"
    )  # in CartPole all members of a group earn the same so soon
    return rljax.make_env(env, max_steps_in_episode=7)


@functools.cache
def data_of(name):
    """What an offline agent learns from: a few random steps, in episodes of seven; else None."""
    if name not in RECORDED:
        return None
    env, rng = env_of(name), np.random.default_rng(0)
    size = (70, *env.observation_space.shape)
    observation = rng.standard_normal(size, np.float32)
    action = np.asarray(jax.vmap(env.action_space.sample)(jax.random.split(jax.random.key(0), 70)))
    ends = np.arange(70) % 7 == 6
    steps = replay.Transition(
        observation=observation,
        action_mask=None,
        action=action,
        reward=rng.standard_normal(70).astype(np.float32),
        terminated=ends & (np.arange(70) % 2 == 0),
        truncated=ends & (np.arange(70) % 2 == 1),
        next_observation=rng.standard_normal(size, np.float32),
        next_action_mask=None,
    )
    return {"dataset": make_dataset(steps)}


def test_every_agent_is_here():
    assert set(AGENTS) <= set(EVERY)


def plain(tree):
    """Keys as numbers."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), tree)


VARIANTS = {
    "ppo": dict(normalize_observations=True, normalize_rewards=True),
    "grpo": dict(kl_coef=0.1),
    "ppo of tokens": dict(kl_target=0.1, scale_rewards=True, value_network="separate"),
    "dpo": dict(loss="kto", likelihood_coef=0.5, label_noise=0.1),
    "dqn": dict(prioritized=True, n_step=3, duelling=True),
}


def small_config(name):
    return dataclasses.replace(SMALL[name], **VARIANTS.get(name, {}))


@functools.cache
def small(name):
    """``(agent, its first state, its compiled step)``, shared by the tests that follow."""
    agent = rljax.make_agent(small_config(name), env_of(name))
    data = data_of(name)
    step = quick_jit(lambda state, data: agent.step(state, data)[0])
    return agent, quick_jit(agent.init)(jax.random.key(0), data), functools.partial(step, data=data)


@pytest.mark.parametrize("name", EVERY)
def test_resume_is_bit_for_bit(name):
    _, start, step = small(name)
    straight = step(step(step(step(start))))
    numbers = plain(step(step(start)))  # what a checkpoint holds
    restored = jax.tree.map(
        lambda like, x: jax.random.wrap_key_data(x) if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else jnp.asarray(x),
        start,
        numbers,
    )
    jax.tree.map(np.testing.assert_array_equal, plain(straight), plain(step(step(restored))))


@pytest.mark.parametrize("name", EVERY)
def test_state_types_are_stable(name):
    """A state that changed its type would be compiled again, and could not be a scan's carry."""
    agent, _, _ = small(name)
    before = jax.eval_shape(agent.init, jax.random.key(0), data_of(name))
    after = jax.eval_shape(lambda s, data: agent.step(s, data)[0], before, data_of(name))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


@pytest.mark.parametrize("name", EVERY)
def test_every_step_draws_afresh_and_learns(name):
    _, start, step = small(name)
    states = [start, step(start), step(step(start))]
    assert len({tuple(np.asarray(jax.random.key_data(s.key)).tolist()) for s in states}) == 3
    for before, after in itertools.pairwise(states):
        leaves = zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
        assert any(np.any(a != b) for a, b in leaves)


@pytest.mark.parametrize("name", EVERY)
def test_traced_hyper_parameters_are_swept_by_vmap(name):
    """Every traced field at once; a lane equals its solo run up to rounding."""
    own = small_config(name)
    fields = [f.name for f in dataclasses.fields(own) if f.metadata["traced"]]
    values = {field: getattr(own, field) for field in fields}
    values = {field: value for field, value in values.items() if value is not None}

    data = data_of(name)

    def final(factor, data):
        config = dataclasses.replace(own, **{field: value * factor for field, value in values.items()})
        agent = rljax.make_agent(config, env_of(name))
        state = agent.init(jax.random.key(0), data)
        return jax.lax.scan(lambda s, _: agent.step(s, data), state, length=2)[0].params

    swept = quick_jit(jax.vmap(final, (0, None)))(jnp.array([0.9, 1.0]), data)
    _, start, step = small(name)
    solo = step(step(start)).params
    for many, one in zip(jax.tree.leaves(swept), jax.tree.leaves(solo), strict=True):
        np.testing.assert_allclose(many[1], one, atol=2e-3)


@pytest.mark.parametrize("name", EVERY)
def test_actions_are_in_the_space(name):
    env, (agent, state, _) = env_of(name), small(name)
    timestep = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 16))[1]
    for greedy in (False, True):
        act = quick_jit(lambda state, timestep, greedy=greedy: agent.act(state, None, timestep, jax.random.key(2), greedy))
        _, action = act(state, timestep)
        assert action.shape == (16, *env.action_space.shape) and action.dtype == env.action_space.dtype
        assert jax.vmap(env.action_space.contains)(action).all()


def test_a_space_that_an_agent_cannot_act_in_names_the_key():
    for name in ("pqn", "dqn", "c51"):
        with pytest.raises(ValueError, match=r"algo\.name"):
            rljax.make_agent(SMALL[name], rljax.make_env("Pendulum-v1"))
    with pytest.raises(ValueError, match=r"algo\.name"):
        rljax.make_agent(SMALL["td3"], rljax.make_env("CartPole-v1"))

    @dataclasses.dataclass(frozen=True)
    class Unbounded(probes.ContinuousTarget):
        action_space = Box(-jnp.inf, jnp.inf, (1,))

    for name in ("sac", "td3"):
        with pytest.raises(ValueError, match="finite bounds"):
            rljax.make_agent(SMALL[name], Unbounded())
    with pytest.raises(ValueError, match=r"algo\.name sft needs an environment of tokens"):
        rljax.make_agent(SMALL["sft"], rljax.make_env("CartPole-v1"))
    assert isinstance(probes.MaskedBandit.action_space, Discrete)
