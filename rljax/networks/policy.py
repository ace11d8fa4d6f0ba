"""A policy is a network bound to the spaces of an environment, as a tuple of pure functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.core import Tracer

from rljax.envs.base import TimeStep
from rljax.envs.spaces import Box, Discrete, MultiDiscrete, Space, Tokens
from rljax.networks.distributions import Categorical, Distribution, Gaussian, MultiCategorical, TanhGaussian, mask_logits
from rljax.networks.torsos import MLP, MinAtarCNN, ResettableGRU, dense

NETWORKS = ("mlp", "minatar_cnn", "gru")
DISTRIBUTIONS = ("auto", "categorical", "gaussian", "tanh_gaussian")


class PolicyOutput(struct.PyTreeNode):
    """``distribution`` over actions and ``value`` float32, both with the leading axes of the time steps."""

    distribution: Any
    value: Array


class Policy(NamedTuple):
    """Pure functions over time steps; ``B`` is the batch axis and ``T`` time.

    A feed-forward policy has the empty carry ``()``. A recurrent one zeroes its carry by itself where
    ``timestep.terminated | timestep.truncated`` says that ``timestep.observation`` is the first of a new episode.

    Attributes:
      init: ``(key, timestep [B]) -> params``.
      start: ``(params, timestep [B]) -> carry``, each leaf ``[B, ...]``.
      step: ``(params, carry, timestep [B]) -> (carry, PolicyOutput [B])``.
      unroll: ``(params, carry, timesteps [T, B]) -> PolicyOutput [T, B]``, equal to T calls of step.
    """

    init: Callable[[Array, TimeStep], Any]
    start: Callable[[Any, TimeStep], Any]
    step: Callable[[Any, Any, TimeStep], tuple[Any, PolicyOutput]]
    unroll: Callable[[Any, Any, TimeStep], PolicyOutput]


def with_critic(policy: Policy, critic: Policy) -> Policy:
    """A policy whose value is another network's, with parameters of its own under "critic". `Policy.step` gives no value."""

    def init(key: Array, timestep: TimeStep) -> Any:
        policy_key, critic_key = jax.random.split(key)
        return {**policy.init(policy_key, timestep), "critic": critic.init(critic_key, timestep)}

    def start(params: Any, timestep: TimeStep) -> Any:
        return policy.start(params, timestep), critic.start(params["critic"], timestep)

    def step(params: Any, carry: Any, timestep: TimeStep) -> tuple[Any, PolicyOutput]:
        own, output = policy.step(params, carry[0], timestep)
        return (own, carry[1]), output

    def unroll(params: Any, carry: Any, timesteps: TimeStep) -> PolicyOutput:
        value = critic.unroll(params["critic"], carry[1], timesteps).value
        return policy.unroll(params, carry[0], timesteps).replace(value=value)

    return Policy(init, start, step, unroll)


def as_features(observation: Array, num_categories: int) -> Array:
    """Float32 network input; ``num_categories`` of Discrete or Tokens, which become one-hot (no token: zeros), 0 for a Box."""
    if num_categories:
        return jax.nn.one_hot(observation, num_categories)
    return observation.astype(jnp.float32)


class ActorCritic(nn.Module):
    """Policy head and value head, on torsos of their own (mlp, minatar_cnn) or on one recurrent torso (gru).

    The last layers start at scale 0.01 (policy: nearly uniform) and 1 (value), as in PPO's reference code.
    """

    network: str
    hidden: tuple[int, ...]
    activation: str
    num_outputs: int
    state_independent_std: bool
    num_categories: int  # of a Discrete or Tokens observation, 0 for a Box
    has_value: bool

    @nn.compact
    def __call__(self, carry: Any, observation: Array, first: Array) -> tuple[Any, Array, Array | None, Array]:
        """``observation [T, B, ...]``, ``first [T, B]`` -> carry, head ``[T, B, outputs]``, log_std, value ``[T, B]``."""
        time_batch = first.shape
        x = as_features(observation, self.num_categories)
        x = x.reshape(-1, *x.shape[2:])
        if self.network == "gru":
            encoded = MLP(self.hidden[:-1], self.activation, name="encoder")(x).reshape(*time_batch, -1)
            carry, features = ResettableGRU(self.hidden[-1], name="gru")(carry, (encoded, first))
            actor_features = critic_features = features.reshape(-1, self.hidden[-1])
        else:
            torso = MinAtarCNN if self.network == "minatar_cnn" else MLP
            actor_features = torso(self.hidden, self.activation, name="actor")(x)
            critic_features = torso(self.hidden, self.activation, name="critic")(x) if self.has_value else actor_features
        head = dense(self.num_outputs, 0.01)(actor_features)
        value = dense(1, 1.0)(critic_features) if self.has_value else jnp.zeros(first.size)
        log_std = None
        if self.state_independent_std:
            log_std = self.param("log_std", nn.initializers.zeros_init(), (self.num_outputs,))
        return carry, head.reshape(*time_batch, -1), log_std, value.reshape(time_batch)


def actor_critic(
    observation_space: Space,
    action_space: Space,
    network: str = "mlp",
    hidden: tuple[int, ...] = (64, 64),
    activation: str = "tanh",
    distribution: str = "auto",
    has_value: bool = True,
) -> Policy:
    """An actor-critic `Policy` for the given spaces.

    Args:
      observation_space: a Box (flattened for mlp and gru), or Discrete or Tokens (one-hot).
      action_space: Discrete and MultiDiscrete give (masked) categoricals, Box a Gaussian.
      network: one of `NETWORKS`; for "gru" the last of ``hidden`` is the size of the carry.
      hidden: sizes of the layers.
      activation: see `rljax.networks.torsos.ACTIVATIONS`.
      distribution: one of `DISTRIBUTIONS`; "auto" takes categorical for discrete and gaussian for Box actions.
      has_value: without, there is no value network and every value is 0.

    Raises:
      ValueError: the network cannot take the observations, or the distribution not the actions; names the config key.
    """
    check_observations(observation_space, network)
    num_outputs, make_distribution = _head(action_space, distribution)
    module = ActorCritic(
        network=network,
        hidden=hidden,
        activation=activation,
        num_outputs=num_outputs,
        state_independent_std=isinstance(action_space, Box),
        num_categories=observation_space.n if isinstance(observation_space, Discrete | Tokens) else 0,
        has_value=has_value,
    )

    def start(params: Any, timestep: TimeStep) -> Any:
        del params
        return jnp.zeros((timestep.reward.shape[0], hidden[-1])) if network == "gru" else ()

    def init(key: Array, timestep: TimeStep) -> Any:
        timesteps = jax.tree.map(lambda x: x[None], timestep)
        return module.init(key, start(None, timestep), timesteps.observation, timesteps.done)["params"]

    def apply(params: Any, carry: Any, timesteps: TimeStep) -> tuple[Any, PolicyOutput]:
        outputs: Any = module.apply({"params": params}, carry, timesteps.observation, timesteps.done)
        carry, head, log_std, value = outputs
        return carry, PolicyOutput(make_distribution(head, log_std, timesteps.action_mask), value)

    def step(params: Any, carry: Any, timestep: TimeStep) -> tuple[Any, PolicyOutput]:
        carry, output = apply(params, carry, jax.tree.map(lambda x: x[None], timestep))
        return carry, jax.tree.map(lambda x: x[0], output)

    def unroll(params: Any, carry: Any, timesteps: TimeStep) -> PolicyOutput:
        return apply(params, carry, timesteps)[1]

    return Policy(init, start, step, unroll)


def check_observations(space: Space, network: str, networks: tuple[str, ...] = NETWORKS) -> None:
    """Raises ValueError, naming the config key, where ``network`` cannot take the observations."""
    if network not in networks:
        raise ValueError(f"algo.network must be one of {', '.join(networks)}, got {network!r}")
    if not isinstance(space, Box | Discrete | Tokens):
        raise ValueError(
            f"algo.network {network!r} takes Box, Discrete or Tokens observations, the environment has {type(space).__name__}"
        )
    if network == "minatar_cnn" and (len(space.shape) != 3 or min(space.shape[:2]) < 3):
        raise ValueError(
            f'algo.network "minatar_cnn" takes images [height, width, channels] of 3x3 or more, '
            f'the environment has observations of shape {list(space.shape)}; use "mlp"'
        )


def _head(space: Space, distribution: str) -> tuple[int, Callable[[Array, Any, Array | None], Distribution]]:
    """Number of network outputs, and the function ``(outputs, log_std, action_mask) -> Distribution``."""
    if not isinstance(space, Discrete | MultiDiscrete | Box):
        raise ValueError(f"algo.distribution {distribution!r} has no form for actions of type {type(space).__name__}")
    wanted = "gaussian" if isinstance(space, Box) else "categorical"
    kind = wanted if distribution == "auto" else distribution
    if kind not in DISTRIBUTIONS:
        raise ValueError(f"algo.distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    if (kind == "categorical") != (wanted == "categorical"):
        raise ValueError(
            f'algo.distribution {kind!r} does not fit the {type(space).__name__} actions of the environment; use "auto"'
        )
    if isinstance(space, Discrete):
        return space.n, lambda head, log_std, mask: Categorical(mask_logits(head, mask))
    if isinstance(space, MultiDiscrete):
        return sum(space.nvec), lambda head, log_std, mask: MultiCategorical(mask_logits(head, mask), space.nvec)
    if len(space.shape) != 1:
        raise ValueError(f"Box actions must have one axis, the environment has shape {list(space.shape)}")
    bounds = [x for x in (space.low, space.high) if not isinstance(x, Tracer)]
    if kind == "tanh_gaussian" and not all(np.all(np.isfinite(x)) for x in bounds):
        raise ValueError('algo.distribution "tanh_gaussian" needs actions with finite bounds; use "gaussian"')
    build = TanhGaussian if kind == "tanh_gaussian" else Gaussian
    return space.size, lambda head, log_std, mask: build(
        head, *(jnp.broadcast_to(jnp.asarray(x, jnp.float32), head.shape) for x in (log_std, space.low, space.high))
    )
