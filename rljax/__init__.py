"""rljax: reinforcement learning as pure functions, from CartPole to language models.

Importing this package is cheap; what needs jax is imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "make_env": "rljax.envs",
    "register_env": "rljax.envs",
    "make_agent": "rljax.agents",
    "Online": "rljax.online",
    "agents": "rljax.agents",
    "envs": "rljax.envs",
    "experiment": "rljax.experiment",
    "networks": "rljax.networks",
    "ops": "rljax.ops",
}
__all__ = [
    "Online",
    "__version__",
    "agents",
    "envs",
    "experiment",
    "make_agent",
    "make_env",
    "networks",
    "ops",
    "register_env",
]

if TYPE_CHECKING:
    from rljax import agents, envs, experiment, networks, ops
    from rljax.agents import make_agent
    from rljax.envs import make_env, register_env
    from rljax.online import Online


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rljax' has no attribute {name!r}")
    module = importlib.import_module(_EXPORTS[name])
    return module if _EXPORTS[name] == f"rljax.{name}" else getattr(module, name)
