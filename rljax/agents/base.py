"""What every agent is made of: a config, a tuple of pure functions, and the table of names."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
from jax import Array

from rljax.envs import Environment, TimeStep
from rljax.envs.registry import did_you_mean

NAMES = ("reinforce", "a2c", "ppo", "grpo", "pqn", "dqn", "c51", "sac", "td3")
AGENTS = {name: f"rljax.agents.{name}" for name in NAMES}


class Agent(NamedTuple):
    """An algorithm bound to its config and environment; every function is pure and can be traced.

    Attributes:
      init: ``(key, data=None) -> TrainState``.
      step: ``(state, data=None) -> (TrainState, metrics)``: one whole rollout and update. A metric is a scalar, which is
        averaged over steps, or a pair ``(sum, count)``, whose parts are added up over steps.
      start: ``(state, timestep [B]) -> carry`` of `act` at the beginning of an episode.
      act: ``(state, carry, timestep [B], key, greedy) -> (carry, action [B, ...])``; a carry of None starts an episode.
      env_steps: environment steps of one call of ``step``.
      init_steps: environment steps that ``init`` takes already, to fill a replay buffer.
    """

    init: Callable[..., Any]
    step: Callable[..., tuple[Any, dict[str, Any]]]
    start: Callable[[Any, TimeStep], Any]
    act: Callable[[Any, Any, TimeStep, Array, bool], tuple[Any, Array]]
    env_steps: int
    init_steps: int = 0


def traced(
    default: float | None, doc: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A float that is a pytree leaf: swept by ``vmap`` without a new compilation. ``low <= value <= high``, ``value > above``."""
    return dataclasses.field(default=default, metadata=dict(traced=True, doc=doc, low=low, high=high, above=above))


def static(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] | None = None
) -> Any:
    """A size, name or switch that fixes the program: another value is another compilation."""
    return dataclasses.field(default=default, metadata=dict(traced=False, doc=doc, low=low, high=high, choices=choices))


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(traced, static))
def config(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass whose `traced` fields are pytree leaves and whose `static` fields are structure."""
    cls.__post_init__ = _check_fields  # type: ignore[attr-defined]
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    names = {kind: [f.name for f in dataclasses.fields(made) if f.metadata["traced"] == kind] for kind in (True, False)}
    return jax.tree_util.register_dataclass(made, data_fields=names[True], meta_fields=names[False])


def range_text(meta: Any) -> str:
    """The bounds or choices of a field, as in ">= 0 and <= 1"; empty without any."""
    if meta.get("choices"):
        return "one of " + ", ".join(meta["choices"])
    bounds = ((">=", meta.get("low")), ("<=", meta.get("high")), (">", meta.get("above")))
    return " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


def is_in_range(value: Any, meta: Any) -> bool:
    """Whether a number or a choice is one that its field allows."""
    low, high, above, choices = (meta.get(key) for key in ("low", "high", "above", "choices"))
    if choices is not None and value not in choices:
        return False
    return (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)


def _check_fields(self: Any) -> None:
    """Raises ValueError, naming the field, for a number out of its range or an unknown choice; tracers pass."""
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
        if is_plain and not is_in_range(value, field.metadata):
            raise ValueError(f"algo.{field.name} must be {range_text(field.metadata)}, got {value!r}")


def agent_module(name: str) -> Any:
    """The module of an algorithm, with its ``Config`` and ``make``.

    Raises:
      ValueError: an unknown name, with the nearest ones.
    """
    if name not in AGENTS:
        raise ValueError(f"unknown algo.name {name!r}{did_you_mean(name, list(AGENTS))}; known: {', '.join(AGENTS)}")
    return importlib.import_module(AGENTS[name])


def make_agent(config: Any, env: Environment) -> Agent:
    """Binds an algorithm's config to an environment: ``make_agent(ppo.Config(), make_env("CartPole-v1"))``."""
    return importlib.import_module(type(config).__module__).make(config, env)
