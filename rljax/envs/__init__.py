"""The MDP contract, adapters and wrappers."""

from typing import TYPE_CHECKING, Any

from rljax.envs.base import Environment, TimeStep, all_ended, check, restart, transition
from rljax.envs.host import EnvironmentFailed
from rljax.envs.registry import env_names, env_parameters, make_env, register_env
from rljax.envs.spaces import Box, Discrete, MultiDiscrete, Space, Tokens, space_text
from rljax.envs.vector import VectorEnvironment, group, vectorize
from rljax.envs.wrappers import TimeLimit

if TYPE_CHECKING:
    from rljax.envs.as_gymnasium import to_gymnasium, to_gymnasium_vector
    from rljax.envs.gymnasium import from_gymnasium, from_gymnasium_vector

__all__ = [
    "Box",
    "Discrete",
    "Environment",
    "EnvironmentFailed",
    "MultiDiscrete",
    "Space",
    "TimeLimit",
    "TimeStep",
    "Tokens",
    "VectorEnvironment",
    "all_ended",
    "check",
    "env_names",
    "env_parameters",
    "from_gymnasium",
    "from_gymnasium_vector",
    "group",
    "make_env",
    "register_env",
    "restart",
    "space_text",
    "to_gymnasium",
    "to_gymnasium_vector",
    "transition",
    "vectorize",
]


def __getattr__(name: str) -> Any:
    if name in ("from_gymnasium", "from_gymnasium_vector"):  # gymnasium is slow to import
        from rljax.envs import gymnasium

        return getattr(gymnasium, name)
    if name in ("to_gymnasium", "to_gymnasium_vector"):
        from rljax.envs import as_gymnasium

        return getattr(as_gymnasium, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
