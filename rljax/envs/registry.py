"""Names to environments: gymnax's own, ``brax/``, ``playground/``, ``gymnasium/``, ``module:attribute``, and what users and
packages register."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from rljax import extensions
from rljax.envs import host
from rljax.envs.base import Environment, check
from rljax.envs.host import ON_HOST
from rljax.envs.wrappers import Randomized, ScaleReward, SelectObservation, TimeLimit, check_range, is_range
from rljax.options import did_you_mean, is_number

OWN = {
    "BernoulliBandit": "rljax.envs.bandits:BernoulliBandit",
    "GoalGrid": "rljax.envs.goal:GoalGrid",
    "LinearBandit": "rljax.envs.bandits:LinearBandit",
    "Routing": "rljax.envs.bandits:Routing",
    "StatelessCartPole": "rljax.envs.registry:stateless_cartpole",
    "TicTacToe": "rljax.envs.tictactoe:TicTacToe",
    "text": "rljax.lm.text:text",
    **{
        f"tokens/{name}": f"rljax.lm.tasks:{name}"
        for name in (
            "addition",
            "chain_sum",
            "running_sum",
            "reversing",
            "sorting",
            "brackets",
            "countdown",
            "multiplication",
            "addition_and_reversing",
        )
    },
}
WRAPPERS = {"time_limit": 1, "reward_scale": 1.0}  # keyword arguments of `make_env` for every environment, with examples
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_registered: dict[str, Callable[..., Environment]] = {}


def register_env(name: str, factory: Callable[..., Environment]) -> None:
    """Makes ``factory(**env_params)`` available as ``make_env(name, **env_params)`` and ``env = "name"`` in a config.

    Raises:
      ValueError: the name is taken.
    """
    if name in env_names():
        raise ValueError(f"environment {name!r} exists already; choose another name")
    _registered[name] = factory


def env_names() -> list[str]:
    """Every name that `make_env` knows, ``gymnasium/`` and ``module:attribute`` apart; MuJoCo Playground's if it is installed.

    Those that packages register come last.
    """
    return list(dict.fromkeys([*_own_names(), *extensions.entries("environment")]))


def _own_names() -> list[str]:
    from rljax.envs import brax, gymnax, playground

    physics = [f"brax/{name}" for name in brax.names()] + [f"playground/{name}" for name in playground.names()]
    return [*gymnax.names(), *physics, *OWN, *_registered]


def env_parameters(name: str) -> dict[str, Any]:
    """Keyword arguments that `make_env` takes for ``name``, and their defaults.

    Raises:
      ValueError: an unknown name, one that is registered twice, or one of a package that cannot be loaded.
    """
    from rljax.envs import brax, gymnasium, gymnax, playground

    if name.startswith(ON_HOST):
        return gymnasium.parameters(name.removeprefix(ON_HOST))
    factory = _factory(name)
    if factory is not None:
        signature = inspect.signature(factory).parameters.values()
        return {p.name: None if p.default is p.empty else p.default for p in signature if p.kind != p.VAR_KEYWORD}
    if name.startswith("brax/") and name[5:] in brax.names():
        return brax.parameters(name[5:])
    if name.startswith("playground/"):
        playground.require()
        if name[11:] in playground.names():
            return playground.parameters(name[11:])
    if name in gymnax.names():
        return gymnax.parameters(name)
    if name in gymnax.EXCLUDED:
        raise ValueError(f"env {name!r} is left out: it {gymnax.EXCLUDED[name]}")
    near = did_you_mean(name, env_names())
    if name in gymnasium.gymnasium.registry:
        near = f"; did you mean {ON_HOST + name!r}?"
    raise ValueError(f"unknown env {name!r}{near}; `rljax list` shows all")


def make_env(name: str, *, time_limit: int | None = None, reward_scale: float | None = None, **kwargs: Any) -> Environment:
    """Makes one environment.

    Args:
      name: a gymnax name (``"CartPole-v1"``), ``"brax/ant"``, ``"playground/CartpoleBalance"``, ``"gymnasium/LunarLander-v3"``, a
        name that you or a package registered, or ``"package.module:attribute"`` / ``"path/file.py:attribute"`` for a callable of
        your own that returns an environment.
      time_limit: truncates episodes after this many steps, on top of the environment's own limit.
      reward_scale: multiplies every reward. An experiment evaluates without it.
      **kwargs: the environment's parameters; `env_parameters` lists them. Numbers may be traced. ``{"low": x, "high": y}`` draws
        one anew for each episode: see `Randomized`.

    Raises:
      ValueError: an unknown name or parameter, with the nearest ones.
      ValueError: a time limit that is no whole number of steps; a user's parameter with the name of a wrapper's, or one without a
        default that is not given; a range that is empty, or of a parameter whose number the environment must know.
      TypeError: a user's environment that breaks the contract.
    """
    known = env_parameters(name)
    taken = [key for key in WRAPPERS if key in known]
    if taken:
        raise ValueError(f"env_params.{taken[0]} is a wrapper's for every environment: give the parameter of {name} another name")
    if isinstance(time_limit, int | float) and (time_limit < 1 or time_limit != int(time_limit)):
        raise ValueError(f"env_params.time_limit must be a whole number of steps, 1 or more, got {time_limit}")
    factory = _factory(name)
    signature = [] if factory is None else inspect.signature(factory).parameters.values()
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature)
    for key in kwargs:
        if key not in known and not takes_any:
            raise ValueError(f"unknown key env_params.{key} for {name}{did_you_mean(key, [*known, *WRAPPERS])}")
    if missing := [p.name for p in signature if p.default is p.empty and p.kind in NAMED and p.name not in kwargs]:
        raise ValueError(f"env_params.{missing[0]} is missing: {name} has no default for it")

    def is_drawn(key: str, value: Any) -> bool:
        return is_range(value) or (isinstance(value, Mapping) and is_number(known.get(key)))

    ranges = {key: value for key, value in kwargs.items() if is_drawn(key, value)}
    for key, span in ranges.items():
        check_range(f"env_params.{key}", span)
        if not takes_traced(name, key, kwargs):
            raise ValueError(f"env_params.{key} of {name} cannot be drawn for each episode: its constructor needs the number")
    make = functools.partial(_make, name, factory)
    env = Randomized(lambda **drawn: make(**{**kwargs, **drawn}), ranges) if ranges else make(**kwargs)
    env = env if reward_scale is None else ScaleReward(env, reward_scale)
    return env if time_limit is None else TimeLimit(env, time_limit)


def _make(name: str, factory: Callable[..., Environment] | None, **kwargs: Any) -> Environment:
    from rljax.envs import brax, gymnasium, gymnax, playground

    if factory is not None:
        env = factory(**kwargs)
        check(env, name)
        return env
    if name.startswith("brax/"):
        return brax.make(name[5:], **kwargs)
    if name.startswith("playground/"):
        return playground.make(name[11:], **kwargs)
    if name.startswith(ON_HOST):
        return gymnasium.make(name.removeprefix(ON_HOST), **kwargs)
    return gymnax.make(name, **kwargs)


def takes_traced(name: str, key: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the parameter ``key``, beside the others in ``kwargs``, can be traced: its default is a float that no constructor
    looks at in Python, as the host does with all. Traces the environment to see."""
    default = {**WRAPPERS, **env_parameters(name)}.get(key)
    others = {k: v for k, v in kwargs.items() if k != key and not isinstance(v, jax.Array)}
    return isinstance(default, float) and _takes_traced(name, key, default, json.dumps(others, sort_keys=True))


@functools.lru_cache
def _takes_traced(name: str, key: str, value: float, kwargs: str) -> bool:
    def step(value):
        env = make_env(name, **{**json.loads(kwargs), key: value})
        state, _ = env.reset(jax.random.key(0))
        return env.step(jax.random.key(0), state, jnp.zeros(env.action_space.shape, env.action_space.dtype))

    try:
        if host.is_on_host(make_env(name, **json.loads(kwargs))):
            return False
        jax.eval_shape(step, value)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return False
    except (ValueError, TypeError):
        pass  # a fault of another kind, which making it reports with its key
    return True


def stateless_cartpole(**kwargs: Any) -> Environment:
    """CartPole-v1 without its two velocities, which a policy with memory can infer (POPGym, arXiv 2303.01859)."""
    return SelectObservation(make_env("CartPole-v1", **kwargs), (0, 2))


def _factory(name: str) -> Callable[..., Environment] | None:
    if entry := extensions.find("environment", name, _own_names):
        factory: Callable[..., Environment] = extensions.load("environment", entry)
        if not callable(factory):
            raise ValueError(f"env {name!r} of {extensions.package(entry)}: {entry.value} must be a callable that makes one")
        return factory
    name = OWN.get(name, name)
    if name in _registered or ":" not in name or name.startswith(ON_HOST):
        return _registered.get(name)
    module_name, attribute = name.split(":", 1)
    path = os.path.abspath(module_name) if module_name.endswith(".py") else None
    if path and not os.path.exists(path):
        raise ValueError(f"env {name!r}: no file {module_name}")
    try:
        with extensions.search_path(os.path.dirname(path) if path else os.getcwd()):
            module = _load(path) if path else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"env {name!r}: {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"env {name!r}: {module_name} has no {attribute!r}{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)


def _load(path: str) -> ModuleType:
    """Runs a file once, under a name of its own: two folders may hold files of the same name."""
    unique = f"rljax_file_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, path)
        assert spec is not None and spec.loader is not None  # a path that ends in .py always has them
        sys.modules[unique] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[unique]
            raise
    return sys.modules[unique]
