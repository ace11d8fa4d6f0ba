"""What contextual bandits share: decisions one after the other, each learned from at once, by its own reward alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.agents.base import Agent
from rljax.agents.on_policy import episode_metrics
from rljax.envs import Box, Discrete, Environment, TimeStep, vectorize
from rljax.networks.distributions import mask_logits
from rljax.networks.policy import as_features


class Bandit(NamedTuple):
    """A bandit as pure functions over ``N`` contexts ``[N, size]`` and ``K`` arms.

    Attributes:
      init: ``(key) -> learner``, all that is learned.
      noise: ``(key, N) -> noise [N, ...]``, all that is random in N decisions.
      scores: ``(learner, context, noise) -> (values, scores)``, ``[N, K]`` each: it acts by the highest expected reward where it
        is greedy, and by the highest score while it learns.
      update: ``(learner, context, action [N], reward [N]) -> learner``, after N decisions.
      refresh: ``(learner, key) -> (learner, metrics)``, due after every so many decisions; None where nothing is.
      probabilities: ``(learner, context, action_mask or None) -> [N, K]``, of the actions while it learns; None where they have
        no closed form.
    """

    init: Callable[[Array], Any]
    noise: Callable[[Array, int], Any]
    scores: Callable[[Any, Array, Any], tuple[Array, Array]]
    update: Callable[[Any, Array, Array, Array], Any]
    refresh: Callable[[Any, Array], tuple[Any, dict[str, Array]]] | None = None
    probabilities: Callable[[Any, Array, Array | None], Array] | None = None


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: the learner.
      key: typed PRNG key, advanced at every step.
      world: ``(environment state, time step [N])``.
    """

    params: Any
    key: Array
    world: tuple[Any, TimeStep]


def best(scores: Array, mask: Array | None) -> Array:
    """The legal arm of the highest score, the first of several, int32 ``[N]``."""
    return jnp.argmax(mask_logits(scores, mask), -1).astype(jnp.int32)


def with_intercept(context: Array) -> Array:
    """``[context, 1]``: what a linear model of a reward takes."""
    return jnp.concatenate([context, jnp.ones((*context.shape[:-1], 1))], -1)


def bandit_agent(make_bandit: Callable[[Any, int, int], Bandit], config: Any, env: Environment) -> Agent:
    """The agent around a bandit: ``config.num_steps`` decisions in each of ``config.num_envs`` copies of ``env``.

    Every step is a decision and its reward all that is learned from it, whatever comes after. An evaluation goes on, greedily and
    without learning, from where the environments are: what is drifting has no other place where it could be asked.

    Args:
      make_bandit: ``(config, num_actions, context_size) -> Bandit``.

    Raises:
      ValueError: one line that names the key: actions that are not Discrete, contexts that are no flat array.
    """
    name = make_bandit.__module__.rpartition(".")[2]
    space, actions = env.observation_space, env.action_space
    if not isinstance(actions, Discrete):
        raise ValueError(
            f"algo.name: {name} chooses among Discrete actions, the environment has {type(actions).__name__}; use ppo or sac"
        )
    if not (isinstance(space, Discrete) or (isinstance(space, Box) and len(space.shape) == 1)):
        shape = f"{type(space).__name__} of shape {list(space.shape)}"
        raise ValueError(f"algo.name: {name} takes a flat Box or a Discrete as context, the environment has a {shape}; use dqn")
    categories = space.n if isinstance(space, Discrete) else 0
    # A Discrete(1) says nothing: no context.
    bandit = make_bandit(config, actions.n, space.shape[0] if isinstance(space, Box) else categories if categories > 1 else 0)
    envs = vectorize(env, config.num_envs)

    def context_of(timestep: TimeStep) -> Array:
        context = as_features(timestep.observation, categories)
        return context[..., :0] if categories == 1 else context

    def init(key: Array, data: None = None) -> TrainState:
        key, env_key, learner_key = jax.random.split(key, 3)
        return TrainState(bandit.init(learner_key), key, envs.reset(env_key))

    def step(state: TrainState, data: None = None) -> tuple[TrainState, dict[str, Any]]:
        key, env_key, noise_key, refresh_key = jax.random.split(state.key, 4)

        def decide(loop: Any, draws: Any) -> Any:
            (learner, env_state, timestep), (noise, env_draw) = loop, draws
            context = context_of(timestep)
            expected, action = (best(x, timestep.action_mask) for x in bandit.scores(learner, context, noise))
            env_state, after = envs.step_drawn(env_draw, env_state, action)
            learner = bandit.update(learner, context, action, after.reward)
            return (learner, env_state, after), (after, action != expected)

        env_state, first = state.world
        loop = (state.params, env_state, envs.without_statistics(first))
        noise = jax.vmap(lambda key: bandit.noise(key, config.num_envs))(jax.random.split(noise_key, config.num_steps))
        draws = (noise, envs.draw(env_key, config.num_steps))
        (learner, env_state, _), (timesteps, explores) = jax.lax.scan(decide, loop, draws)
        env_state, timesteps = envs.count_episodes(env_state, timesteps)
        metrics: dict[str, Any] = {
            name: (x.astype(jnp.float32).sum(), jnp.int32(x.size))
            for name, x in {"reward": timesteps.reward, "explored": explores, **timesteps.info}.items()
            if name in ("reward", "explored", "regret")
        }
        if bandit.refresh is not None:
            learner, more = bandit.refresh(learner, refresh_key)
            metrics |= more
        world = (env_state, jax.tree.map(lambda x: x[-1], timesteps))
        return TrainState(learner, key, world), {**metrics, **episode_metrics(timesteps)}

    def start(state: TrainState, timestep: TimeStep, data: None = None) -> tuple[()]:
        return ()

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool, data: None = None) -> Any:
        context = context_of(timestep)
        values, scores = bandit.scores(state.params, context, bandit.noise(key, context.shape[0]))
        return (), best(values if greedy else scores, timestep.action_mask)

    def measure(state: TrainState, key: Array, number: int, data: None = None) -> Array:
        """The rewards ``[number]`` of greedy decisions on as many contexts, drawn from where the environments are."""
        copies = vectorize(env, number)
        env_state, timestep = state.world

        def spread(x: Array) -> Array:
            return x[jnp.arange(number) % config.num_envs]

        pool, whole = env_state.pool, jax.tree.map(spread, env_state.replace(pool=None))
        env_state, timestep = whole.replace(pool=pool), jax.tree.map(spread, timestep)
        for own_key in jax.random.split(key, 2):  # the first leads to a context of each copy's own
            _, action = act(state, (), timestep, own_key, True)
            env_state, timestep = copies.step(own_key, env_state, action)
        return timestep.reward

    return Agent(init, step, start, act, config.num_envs * config.num_steps, measure=measure)
