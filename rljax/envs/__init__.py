"""The MDP contract, adapters and wrappers."""

from rljax.envs.base import Environment, TimeStep, check, restart, transition
from rljax.envs.registry import env_names, env_parameters, make_env, register_env
from rljax.envs.spaces import Box, Discrete, MultiDiscrete, Space, Tokens, space_text
from rljax.envs.vector import VectorEnvironment, all_ended, group, vectorize
from rljax.envs.wrappers import TimeLimit

__all__ = [
    "Box",
    "Discrete",
    "Environment",
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
    "group",
    "make_env",
    "register_env",
    "restart",
    "space_text",
    "transition",
    "vectorize",
]
