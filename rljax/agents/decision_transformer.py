"""Decision Transformer (Chen et al. 2021, arXiv 2106.01345): cloning of actions, given what was still earned after them.

A window of an episode is a text: return-to-go, observation, action, return-to-go, ... (their section 3). What is predicted is the
action after each observation. The policy asks for a high return and goes on as the recorded episodes that earned it did.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from rljax.agents.base import Agent
from rljax.agents.offline import data_of, example, learn, stats_of, view
from rljax.envs import Discrete, Environment, TimeStep, Tokens
from rljax.networks import Transformer
from rljax.networks.distributions import Categorical, mask_logits
from rljax.networks.policy import as_features, check_observations
from rljax.networks.transformer import encode, init_params
from rljax.networks.values import action_bounds
from rljax.ops import dataset, normalization
from rljax.ops.losses import masked_mean
from rljax.options import config, static, traced


@config
class Config:
    learning_rate: float = traced(1e-3, "Adam's step size", low=0)
    max_grad_norm: float = traced(0.25, "bound on the gradient's global norm", above=0)
    weight_decay: float = traced(1e-4, "decoupled, of all parameters (AdamW)", low=0)
    target_return: float | None = traced(None, "return that the policy asks for; none: the highest of the data")
    adam_eps: float = traced(1e-8, "Adam's epsilon", above=0)
    context: int = static(20, "steps of a window, K", low=1)
    batch_size: int = static(64, "windows of a gradient step", low=1)
    num_updates: int = static(16, "gradient steps of one call of step, whose random numbers are drawn at once", low=1)
    normalize_observations: bool = static(True, "by the mean and deviation of the data")
    model: Transformer = static(Transformer(family="gpt2"), "the transformer of [model]; positions: steps that it tells apart")


class Window(struct.PyTreeNode):
    """``K`` steps of one episode, ``[B, K, ...]``.

    Attributes:
      to_go: float32, of this step and all after it, undiscounted, divided by the largest of the data.
      observation: as the network sees it.
      action: Discrete, or a Box scaled to [-1, 1].
      action_mask: bool ``[B, K, A]`` or None.
      step: int32, steps of the episode before this one.
      is_real: bool, False before the episode's first step and after its last.
    """

    to_go: Array
    observation: Array
    action: Array
    action_mask: Array | None
    step: Array
    is_real: Array


class TrainState(struct.PyTreeNode):
    """All that changes.

    Attributes:
      params: ``{"tokens", "blocks", "head"}``.
      opt_state: Adam's moments.
      key: typed PRNG key, advanced at every step.
      target: float32 ``[]``, the return that is asked for, divided by the scale.
      scale: float32 ``[]``, the largest return-to-go of the data.
      observation_stats: of the data.
    """

    params: Any
    opt_state: Any
    key: Array
    target: Array
    scale: Array
    observation_stats: normalization.RunningStats


class TokensOfSteps(nn.Module):
    """Embeds returns-to-go, observations and actions, adds the step of the episode and normalises, as the paper does."""

    width: int
    positions: int

    @nn.compact
    def __call__(self, step: Array, *parts: Array) -> Array:
        """``step [N]``, three parts ``[N, D_i]`` -> ``[N, 3, width]``."""
        # Of unit size: normalised beside a smaller one, a return-to-go would keep its sign and lose its size.
        embedding = nn.Embed(self.positions, self.width, embedding_init=nn.initializers.normal(1.0), name="step")
        time = embedding(jnp.minimum(step, self.positions - 1))
        tokens = [nn.Dense(self.width, name=name)(x) for name, x in zip(("to_go", "observation", "action"), parts, strict=True)]
        return nn.LayerNorm()(jnp.stack([x + time for x in tokens], 1))


def network(config: Config, env: Environment) -> tuple[Any, Any]:
    """``init(key, window) -> params`` and ``predict(params, window)``: logits of Discrete actions, or actions in [-1, 1], after
    each observation of a window, ``[B, K, outputs]``.

    Raises:
      ValueError: observations or an option of the model that have no meaning here; names the key.
    """
    model, space, seen = config.model, env.action_space, env.observation_space
    check_observations(seen, "mlp")
    for name in ("path", "vocab", "tied", "head_chunk", "lora_rank"):
        if getattr(model, name) != getattr(Transformer(), name):
            raise ValueError(f"model.{name} is of models of language; decision_transformer reads steps, so leave it out")
    categories = seen.n if isinstance(seen, Discrete | Tokens) else 0
    choices = space.n if isinstance(space, Discrete) else 0
    tokens_of = TokensOfSteps(model.width, model.positions)
    head = nn.Dense(space.n if isinstance(space, Discrete) else action_bounds(space)[0].size)

    def parts(window: Window) -> list[Array]:
        """The step and what is embedded of it, each ``[B K, ...]``."""
        features = (window.to_go, as_features(window.observation, categories), as_features(window.action, choices))
        return [window.step.reshape(-1), *(x.reshape(window.step.size, -1) for x in features)]

    def init(key: Array, window: Window) -> Any:
        tokens_key, blocks_key, head_key = jax.random.split(key, 3)
        blocks = init_params(model, blocks_key, vocab=0)
        return {
            "tokens": tokens_of.init(tokens_key, *parts(window)),
            "blocks": {name: blocks[name] for name in ("norm", "layers")},
            "head": head.init(head_key, jnp.zeros((1, model.width))),
        }

    def predict(params: Any, window: Window) -> Array:
        batch, length = window.step.shape
        tokens: Any = tokens_of.apply(params["tokens"], *parts(window))
        positions = jnp.broadcast_to(jnp.arange(3 * length), (batch, 3 * length))
        is_real = jnp.repeat(window.is_real, 3, 1)
        hidden = encode(model, params["blocks"], tokens.reshape(batch, 3 * length, -1), positions, is_real)
        outputs: Any = head.apply(params["head"], hidden[:, 1::3].reshape(batch * length, -1))
        outputs = outputs.reshape(batch, length, -1)
        return outputs if choices else jnp.tanh(outputs)

    return init, predict


def make(config: Config, env: Environment) -> Agent:
    """Decision Transformer for Discrete actions or a bounded Box; a step of the run is a gradient step.

    Raises:
      ValueError: one line that names the key: spaces that it cannot take, or an option of a model of language.
    """
    space, length = env.action_space, config.context
    is_discrete = isinstance(space, Discrete)
    low, high = (jnp.zeros(1), jnp.ones(1)) if is_discrete else action_bounds(space)
    init_network, predict = network(config, env)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))

    def init(key: Array, data: Any = None) -> TrainState:
        key, env_key, params_key = jax.random.split(key, 3)
        stats, recorded = stats_of(data, env, config.normalize_observations), data_of(data)
        params = init_network(params_key, empty_window(jnp.zeros(()), example(env, env_key)[0]))
        scale = jnp.maximum(jnp.abs(recorded.to_go).max(), 1e-8)
        best = recorded.returns.max() if config.target_return is None else config.target_return
        return TrainState(params, optimizer.init(params), key, jnp.float32(best) / scale, scale, stats)

    def empty_window(target: Array, timestep: TimeStep) -> Window:
        """Of no steps, before the first of episodes ``[B]``."""

        def nothing(x: Array) -> Array:
            return jnp.zeros((x.shape[0], length, *x.shape[1:]), x.dtype)

        shape = (timestep.reward.shape[0], length)
        masks = None if timestep.action_mask is None else nothing(timestep.action_mask)
        return Window(
            to_go=jnp.broadcast_to(jnp.float32(target), shape),
            observation=nothing(timestep.observation),
            action=jnp.zeros((*shape, *space.shape), space.dtype),
            action_mask=masks,
            step=jnp.full(shape, -1),
            is_real=jnp.zeros(shape, bool),
        )

    def draw(data: Any, state: TrainState, uniforms: Array) -> Window:
        """Windows that start at any step of the data and are cut where their episode ends."""
        recorded = data_of(data)
        rows, is_real = dataset.windows(recorded, uniforms, length)
        steps = jax.tree.map(lambda x: x[rows], recorded.transitions)
        return Window(
            to_go=recorded.to_go[rows] / state.scale,
            observation=view(state.observation_stats, steps.observation),
            action=steps.action if is_discrete else 2 * (steps.action - low) / (high - low) - 1,
            action_mask=steps.action_mask,
            step=recorded.step[rows],
            is_real=is_real,
        )

    def loss(params: Any, window: Window) -> Array:
        """``-log pi(a|...)`` of Discrete actions, ``(a - pi(...))^2`` of a Box."""
        outputs = predict(params, window)
        if is_discrete:
            error = -Categorical(mask_logits(outputs, window.action_mask)).log_prob(window.action)
        else:
            error = jnp.square(outputs - window.action).mean(-1)
        return masked_mean(error, window.is_real)

    def step(state: TrainState, data: Any = None) -> tuple[TrainState, dict[str, Any]]:
        key, learn_key = jax.random.split(state.key)

        def update(learner: Any, window: Window, key: Array) -> Any:
            params, opt_state = learner
            value, gradient = jax.value_and_grad(loss)(params, window)
            direction, opt_state = optimizer.update(gradient, opt_state)
            params = jax.tree.map(lambda p, d: p - config.learning_rate * (d + config.weight_decay * p), params, direction)
            return (params, opt_state), {"loss/action": value, "grad_norm": optax.tree.norm(gradient)}

        sizes = (config.num_updates, config.batch_size)
        draws = functools.partial(draw, data, state)
        learner, metrics = learn(update, (state.params, state.opt_state), draws, learn_key, sizes)
        params, opt_state = learner
        return state.replace(params=params, opt_state=opt_state, key=key), metrics

    def start(state: TrainState, timestep: TimeStep, data: Any = None) -> Window:
        return empty_window(state.target, timestep)

    def act(state: TrainState, carry: Any, timestep: TimeStep, key: Array, greedy: bool, data: Any = None) -> Any:
        past = start(state, timestep) if carry is None else carry
        is_new = timestep.done  # what is seen is the first of a new episode
        now = Window(
            to_go=jnp.where(is_new, state.target, past.to_go[:, -1] - timestep.reward / state.scale),
            observation=view(state.observation_stats, timestep.observation),
            action=jnp.zeros_like(past.action[:, -1]),  # nothing before it sees it
            action_mask=timestep.action_mask,
            step=jnp.where(is_new, 0, past.step[:, -1] + 1),
            is_real=jnp.ones_like(is_new),
        )
        past = past.replace(is_real=past.is_real & ~is_new[:, None])
        window = jax.tree.map(lambda xs, x: jnp.concatenate([xs[:, 1:], x[:, None].astype(xs.dtype)], 1), past, now)
        output = predict(state.params, window)[:, -1]
        if is_discrete:
            choices = Categorical(mask_logits(output, timestep.action_mask))
            action = said = choices.mode() if greedy else choices.sample(key)
        else:
            action, said = low + (high - low) * (output + 1) / 2, output
        return window.replace(action=window.action.at[:, -1].set(said)), action

    return Agent(init, step, start, act, env_steps=config.num_updates, learns_from="data")
