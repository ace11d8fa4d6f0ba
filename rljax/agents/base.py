"""What every agent is made of: a config, a tuple of pure functions, and the table of names."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.flatten_util import ravel_pytree

from rljax import extensions
from rljax.envs import Environment
from rljax.networks import Policy
from rljax.networks.transformer import join
from rljax.options import did_you_mean

BANDITS = ("linucb", "thompson", "epsilon_greedy", "neural_linear")
NAMES = (
    *("reinforce", "a2c", "ppo", "grpo", "pqn", "dqn", "c51", "sac", "td3"),
    *("bc", "iql", "cql", "td3_bc", "decision_transformer"),
    *("sft", "dpo", "reward_model"),
    *BANDITS,
)
AGENTS = {name: f"rljax.agents.{name}" for name in NAMES}


class Agent(NamedTuple):
    """An algorithm bound to its config and environment; every function is pure and can be traced.

    Attributes:
      init: ``(key, data=None) -> TrainState``; ``(key, data, params=...)`` of an agent that can go on from parameters trained
        before.
      step: ``(state, data=None) -> (TrainState, metrics)``: one whole rollout and update. A metric is a scalar, which is
        averaged over steps, or a pair ``(sum, count)``, whose parts are added up over steps.
      start: ``(state, timestep [B], data=None) -> carry`` of `act` at the beginning of an episode.
      act: ``(state, carry, timestep [B], key, greedy, data=None) -> (carry, action [B, ...])``; a carry of None starts an
        episode.
      env_steps: environment steps of one call of ``step``.
      init_steps: environment steps that ``init`` takes already, to fill a replay buffer.
      policy: what acts, given `whole` parameters; None where the agent does not act by a `Policy`.
      begins_with: ``(key) -> params``, random parameters of the shape that ``init`` takes; None where it takes none.
      measure: ``(state, key, number, data=None) -> [number]``: what an evaluation reports in place of the returns of episodes;
        None for every agent that is judged by them.
      learns_from: "play": rewards of what it plays itself; "examples": demonstrations, pairs or labels, whoever pays; "data":
        recorded steps, in ``data``, whose steps are gradient steps.

    ``data`` is what all lanes share and none changes: ``{"base": parameters}`` of a pretrained model that adapters are trained
    on, or ``{"dataset": Dataset}`` of recorded steps (`rljax.ops.dataset`).
    """

    init: Callable[..., Any]
    step: Callable[..., tuple[Any, dict[str, Any]]]
    start: Callable[..., Any]
    act: Callable[..., tuple[Any, Array]]
    env_steps: int
    init_steps: int = 0
    policy: Policy | None = None
    begins_with: Callable[[Array], Any] | None = None
    measure: Callable[..., Array] | None = None
    learns_from: str = "play"


LARGE = 2**16  # parameters


def packed(params: Any) -> tuple[Any, Callable[[Any], Any]]:
    """``(packed, unpack)``: parameters, or a gradient, in the form that an optimiser updates, and the way back.

    Small networks become one flat vector: a few operations on one array instead of on a dozen small ones. Networks of `LARGE`
    and more stay as they are, since copying them into a vector and out of it would take longer than that saves.
    """
    if sum(x.size for x in jax.tree.leaves(params)) < LARGE:
        return ravel_pytree(params)
    return params, lambda packed: packed


def whole(params: Any, data: Any) -> Any:
    """What a policy takes: the parameters that are trained, joined to the base that ``data`` holds, if any."""
    return join(data["base"], params) if data and "base" in data else params


def agent_names() -> list[str]:
    """Every name that `agent_module` knows; those that packages register come last."""
    return list(dict.fromkeys([*AGENTS, *extensions.entries("agent")]))


def agent_module(name: str) -> Any:
    """The module of an algorithm, with its ``Config`` and ``make``.

    Raises:
      ValueError: an unknown name, with the nearest ones; one that is registered twice, or of a package that cannot be loaded, or
        whose module has another name too: its configs would not say which.
    """
    if entry := extensions.find("agent", name, lambda: AGENTS):
        module = extensions.load("agent", entry)
        twins = [other for other, found in extensions.entries("agent").items() for e in found if e.value == entry.value]
        twins += [own for own, value in AGENTS.items() if value == entry.value]
        if others := sorted({*twins} - {name}):
            raise ValueError(
                f"agent {name!r} of {extensions.package(entry)}: {entry.value} is {others[0]!r} too, and an agent has one name: "
                "keep one of the entry points"
            )
        if not hasattr(module, "make") or getattr(getattr(module, "Config", None), "__module__", "") != entry.value:
            raise ValueError(f"agent {name!r} of {extensions.package(entry)}: {entry.value} must be a module of Config and make")
        return module
    if name not in AGENTS:
        known = agent_names()
        raise ValueError(f"unknown algo.name {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    return importlib.import_module(AGENTS[name])


def agent_name(config: Any) -> str:
    """The name of the algorithm that a config is of."""
    module = type(config).__module__
    sole = [found[0] for name, found in extensions.entries("agent").items() if len(found) == 1 and name not in AGENTS]
    named = {entry.value: entry.name for entry in sole} | {value: name for name, value in AGENTS.items()}
    return named.get(module) or module.rpartition(".")[2]


def make_agent(config: Any, env: Environment) -> Agent:
    """Binds an algorithm's config to an environment: ``make_agent(ppo.Config(), make_env("CartPole-v1"))``."""
    return importlib.import_module(type(config).__module__).make(config, env)
