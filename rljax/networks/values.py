"""Feed-forward networks for agents that learn from single transitions: outputs, action values, critics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from rljax.envs.spaces import Box, Discrete, Space, Tokens
from rljax.networks.policy import as_features, check_observations
from rljax.networks.torsos import MLP, MinAtarCNN, dense

FEED_FORWARD = ("mlp", "minatar_cnn")


class Network(NamedTuple):
    """Pure functions over batches of inputs ``[M, ...]``.

    Attributes:
      init: ``(key, *inputs) -> params``.
      apply: ``(params, *inputs) -> outputs``, ``[M, ...]``, and of critics ``[num, M, ...]``.
    """

    init: Callable[..., Any]
    apply: Callable[..., Array]


class Head(nn.Module):
    """A torso and a linear layer; duelling (Wang et al. 2016, arXiv 1511.06581, eq. 9) with a torso for each stream.

    ``Q(s, a) = V(s) + A(s, a) - mean over a of A(s, a)``; with atoms, for each atom by itself.
    """

    network: str
    hidden: tuple[int, ...]
    activation: str
    num_outputs: int
    num_categories: int
    scale: float
    layer_norm: bool
    duelling_actions: int  # 0: no duelling
    initialization: str

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        x = as_features(observation, self.num_categories)

        def stream(num_outputs: int) -> Array:
            torso = MinAtarCNN if self.network == "minatar_cnn" else MLP
            features = torso(self.hidden, self.activation, self.layer_norm, self.initialization)(x)
            return dense(num_outputs, self.scale, self.initialization)(features)

        outputs = stream(self.num_outputs)
        if not self.duelling_actions:
            return outputs
        advantages = outputs.reshape(x.shape[0], self.duelling_actions, -1)
        values = stream(advantages.shape[-1])
        return (values[:, None] + advantages - advantages.mean(1, keepdims=True)).reshape(outputs.shape)


class Critics(nn.Module):
    """``num`` networks over observation and action side by side."""

    hidden: tuple[int, ...]
    activation: str
    num_categories: int
    num: int

    @nn.compact
    def __call__(self, observation: Array, action: Array) -> Array:
        x = as_features(observation, self.num_categories).reshape(action.shape[0], -1)
        x = jnp.concatenate([x, action], -1)
        # Networks of their own and not one with a leading axis: matrix products are faster than batches of them on CPU.
        return jnp.stack([dense(1, 1.0)(MLP(self.hidden, self.activation)(x))[:, 0] for _ in range(self.num)])


def feed_forward(
    observation_space: Space,
    num_outputs: int,
    network: str,
    hidden: tuple[int, ...],
    activation: str,
    *,
    scale: float = 0.01,
    layer_norm: bool = False,
    duelling_actions: int = 0,
    initialization: str = "orthogonal",
) -> Network:
    """``observation [M, ...] -> [M, num_outputs]``; the last layer starts at ``scale``.

    Raises:
      ValueError: the network cannot take the observations; names the config key.
    """
    check_observations(observation_space, network, FEED_FORWARD)
    sizes = (network, hidden, activation, num_outputs, _categories(observation_space))
    return _bind(Head(*sizes, scale, layer_norm, duelling_actions, initialization))


def action_values(
    observation_space: Space,
    action_space: Space,
    network: str,
    hidden: tuple[int, ...],
    activation: str,
    *,
    duelling: bool = False,
    atoms: int | None = None,
    layer_norm: bool = False,
    initialization: str = "orthogonal",
) -> Network:
    """``observation [M, ...] -> Q [M, A]``, or ``[M, A, atoms]``, of discrete actions.

    Raises:
      ValueError: the actions are not Discrete, or the network cannot take the observations.
    """
    if not isinstance(action_space, Discrete):
        raise ValueError(
            f"algo.name: values of single actions need Discrete actions, the environment has {type(action_space).__name__}; "
            "use sac or td3 for Box actions, ppo for either"
        )
    size = action_space.n
    values = feed_forward(
        observation_space,
        size * (atoms or 1),
        network,
        hidden,
        activation,
        scale=1.0,
        layer_norm=layer_norm,
        duelling_actions=size if duelling else 0,
        initialization=initialization,
    )
    if atoms is None:
        return values
    return Network(values.init, lambda params, x: values.apply(params, x).reshape(-1, size, atoms))


def continuous_critics(
    observation_space: Space, action_space: Space, hidden: tuple[int, ...], activation: str, num: int
) -> Network:
    """``(observation [M, ...], action [M, D]) -> Q [num, M]``; actions are scaled to [-1, 1] by the box on their way in.

    Raises:
      ValueError: actions that are not a flat Box with finite bounds.
    """
    low, high = action_bounds(action_space)
    check_observations(observation_space, "mlp")
    critics = _bind(Critics(hidden, activation, _categories(observation_space), num))

    def scaled(action: Array) -> Array:
        return (action - 0.5 * (high + low)) / (0.5 * (high - low))

    return Network(
        lambda key, observation, action: critics.init(key, observation, scaled(action)),
        lambda params, observation, action: critics.apply(params, observation, scaled(action)),
    )


def action_bounds(space: Space) -> tuple[Array, Array]:
    """``(low, high)`` of a Box of actions, float32 ``[D]``.

    Raises:
      ValueError: another space, more than one axis, or bounds that are not finite or leave no room.
    """
    if not isinstance(space, Box):
        raise ValueError(f"algo.name: {type(space).__name__} actions do not fit this agent; use ppo, or dqn for Discrete ones")
    if len(space.shape) != 1:
        raise ValueError(f"Box actions must have one axis, the environment has shape {list(space.shape)}")
    known = [x for x in (space.low, space.high) if not isinstance(x, Tracer)]
    if not all(np.all(np.abs(x) < 1e30) for x in known):  # beyond that "unbounded" is meant
        raise ValueError("algo.name: this agent needs actions with finite bounds, the environment's are infinite; use ppo")
    if len(known) == 2 and not np.all(np.asarray(space.low) < np.asarray(space.high)):
        raise ValueError("algo.name: this agent needs actions whose lower bound is below the upper one")
    low, high = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), space.shape) for x in (space.low, space.high))
    return low, high


def _categories(space: Space) -> int:
    return space.n if isinstance(space, Discrete | Tokens) else 0


def _bind(module: nn.Module) -> Network:
    def apply(params: Any, *inputs: Array) -> Array:
        outputs: Any = module.apply({"params": params}, *inputs)
        return outputs

    return Network(lambda key, *inputs: module.init(key, *inputs)["params"], apply)
