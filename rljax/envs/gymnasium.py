"""Adapter for Gymnasium: ``gymnasium/<id>``, stepped on the host. `rljax.envs.as_gymnasium` is the other way.

Gymnasium's environments are Python objects, which the host steps: see `rljax.envs.host`. They are made one by one, and never
reset by themselves, so that flags and final observations are theirs. What exists as a vector environment only is made as one for
all copies, if its autoreset mode keeps all of that.
"""

import contextlib
import dataclasses
import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from rljax import extensions
from rljax.envs import host
from rljax.envs.host import ON_HOST
from rljax.envs.spaces import Box, Discrete, MultiDiscrete, Space
from rljax.options import did_you_mean

IN_EXTRA = ("gymnasium.envs.box2d", "gymnasium.envs.mujoco")  # modules of environments whose libraries the extra installs


def parameters(name: str) -> dict[str, Any]:
    """Keyword arguments of `make` and their defaults: the constructor's, and the limit on steps.

    Raises:
      ValueError: an unknown name, with the nearest ones; a library that it needs is not installed.
    """
    spec = _spec(name)
    limit = {} if _is_vector(spec) and spec.max_episode_steps is None else {"max_episode_steps": spec.max_episode_steps}
    arguments = {**_arguments(name, spec), **spec.kwargs, **limit}
    return {key: value.value if isinstance(value, AutoresetMode) else value for key, value in arguments.items()}


def make(name: str, **kwargs: Any) -> host.HostEnvironment:
    """Makes ``name``, an id of Gymnasium's registry, or ``module:id`` of one that the module registers.

    Args:
      **kwargs: as of ``gymnasium.make``, or of the constructor of what is registered as a vector environment only.

    Raises:
      ValueError: an unknown name, parameters that it refuses, a library that is not installed, spaces that do not fit, or a
        vector environment that resets its copies a step too late.
    """
    spec = _spec(name)
    for key, default in parameters(name).items():
        _check_kind(key, kwargs.get(key, default), default)
    if not _is_vector(spec):
        spec = dataclasses.replace(spec, order_enforce=False)  # `host` resets before it steps

        def made(render_mode: str | None = None) -> gymnasium.Env:
            # Constructors need not take it.
            drawn: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
            with _explained(name, spec):  # `host` checks, and Gymnasium's checking takes most of a step
                return gymnasium.make(spec, disable_env_checker=True, **kwargs, **drawn)

        return from_gymnasium(made, ON_HOST + name)

    default, given = _arguments(name, spec).get("autoreset_mode"), kwargs.get("autoreset_mode")
    modes = [mode.value for mode in AutoresetMode]
    if given is not None and given not in modes:
        raise ValueError(f"env_params.autoreset_mode must be one of {', '.join(modes)}, got {given!r}")
    if isinstance(default, AutoresetMode) and given is not None:
        kwargs["autoreset_mode"] = AutoresetMode(given)

    def made_together(num_envs: int) -> VectorEnv:
        with _explained(name, spec):
            return gymnasium.make_vec(spec, num_envs=num_envs, **kwargs)

    has_mode = "autoreset_mode" in _arguments(name, spec)
    way_out = 'set env_params.autoreset_mode = "SameStep" or "Disabled"' if has_mode else "it takes no autoreset_mode"
    return _of_vector(made_together, ON_HOST + name, way_out)


def from_gymnasium(make: Callable[..., gymnasium.Env], name: str = "environment") -> host.HostEnvironment:
    """An `rljax.envs.Environment` whose copies are what ``make`` returns, stepped on the host.

    Observations: a Box (of float64 as float32, of integers but uint8 as int32), Discrete from 0, MultiDiscrete one-hot side by
    side and MultiBinary as a Box of float32. Actions: a Box, Discrete from 0, MultiDiscrete and MultiBinary as MultiDiscrete.

    Args:
      make: called for every copy; each must be independent of the others. One that takes ``render_mode`` gets "rgb_array" for
        pictures.
      name: for messages.

    Raises:
      ValueError: a space of another kind.
    """
    first = make()
    translation = _translation(first.observation_space, first.action_space, name)
    is_drawn = "render_mode" in inspect.signature(make).parameters and "rgb_array" in first.metadata.get("render_modes", ())

    def made_drawn() -> gymnasium.Env:
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame would look for what is not needed, and complain
        if not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        return make(render_mode="rgb_array")

    return host.HostEnvironment(host.SingleCopies(name, make, translation, first, made_drawn if is_drawn else None))


def from_gymnasium_vector(make: Callable[[int], VectorEnv], name: str = "environment") -> host.HostEnvironment:
    """`from_gymnasium` for vector environments: ``make(num_envs)`` returns one, which steps all copies of a call together.

    Its autoreset mode must be ``SAME_STEP``, where ``info["final_obs"]`` has what an episode ended with and the simulator draws
    the next one, or ``DISABLED``, where ``reset(seed=..., options={"reset_mask": ...})`` begins it. ``NEXT_STEP`` cannot be
    exact: the step after an episode's end plays nothing, and would be learnt from.

    Args:
      make: called for each number of copies that a program steps together, and for 2, to look at them.
      name: for messages.

    Raises:
      ValueError: a space of another kind, or another autoreset mode.
    """
    return _of_vector(make, name, "make it with autoreset_mode SameStep or Disabled, if it takes one")


def _of_vector(make: Callable[[int], VectorEnv], name: str, way_out: str) -> host.HostEnvironment:
    first = make(2)
    mode = first.metadata.get("autoreset_mode")
    if mode not in (*AutoresetMode, *(mode.value for mode in AutoresetMode)):
        raise ValueError(f"env {name!r} does not say how it begins episodes: its metadata has no autoreset_mode")
    if AutoresetMode(mode) is AutoresetMode.NEXT_STEP:
        raise ValueError(f"env {name!r} has autoreset mode NextStep, whose steps after an episode's end play nothing: {way_out}")
    translation = _translation(first.single_observation_space, first.single_action_space, name)
    same_step = AutoresetMode(mode) is AutoresetMode.SAME_STEP
    return host.HostEnvironment(host.VectorCopies(name, make, translation, first, same_step, _seeds_of(first)))


def _seeds_of(env: VectorEnv) -> str:
    """How resets of ``env``, of two copies, take seeds; Gymnasium asks for one integer, and many take one for each copy.

    A list is one seed too, of all its numbers, for what hands it to numpy as it is: its copies do not start alike.
    """
    ways: dict[str, Any] = {"list": [7, 7], "array": np.full(2, 7)}
    for way, seed in ways.items():
        with contextlib.suppress(Exception):
            both, _ = env.reset(seed=seed)
            if np.array_equal(both[0], both[1]):
                return way
    return "one"


def _is_vector(spec: Any) -> bool:
    return spec.entry_point is None


def _arguments(name: str, spec: Any) -> dict[str, Any]:
    """Of the constructor, with their defaults."""
    entry = spec.vector_entry_point if _is_vector(spec) else spec.entry_point
    with _explained(name, spec):
        constructor = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters.values()
    others = ("render_mode", "num_envs") if _is_vector(spec) else ("render_mode",)
    return {p.name: p.default for p in constructor if p.default is not p.empty and p.name not in others}


def _check_kind(key: str, value: Any, default: Any) -> None:
    """Constructors often take anything, and ``"no"`` for true. What has another kind than its default may still be meant."""
    kinds = ((bool, "true or false", not isinstance(value, bool)), (int | float, "a number", isinstance(value, bool | str)))
    kinds += ((str, "a string", isinstance(value, bool | int | float)),)
    _, kind, is_wrong = next((k for k in kinds if isinstance(default, k[0])), (None, "", False))
    if is_wrong:
        raise ValueError(f"env_params.{key} must be {kind}, as {default!r} is, got {value!r}")


def _spec(name: str) -> Any:
    module, _, own = name.rpartition(":")
    prefix = ON_HOST + f"{module}:" * bool(module)
    if module.startswith("."):
        raise ValueError(f"env {ON_HOST + name!r}: no package says what {module} is relative to; name the module in full")
    if not own:
        raise ValueError(f"env {ON_HOST + name!r} lacks the id of an environment, as in {prefix}CartPole-v1")
    try:
        if module:
            with extensions.search_path(os.getcwd()):
                importlib.import_module(module)
        return gymnasium.spec(own)
    except ImportError as error:
        hint = ": pip install ale-py" if getattr(error, "name", None) == "ale_py" else ""
        raise ValueError(f"env {ON_HOST + name!r}: {error}{hint}") from error
    except gymnasium.error.NamespaceNotFound as error:
        space = own.partition("/")[0]
        module, install = ("ale_py", "pip install ale-py, and ") if space == "ALE" else ("module", "")
        how = f'{install}env = "{ON_HOST}{module}:{own}" imports the module that registers it'
        raise ValueError(f"unknown env {ON_HOST + name!r}: nothing is registered under {space}/; {how}") from error
    except gymnasium.error.Error as error:
        said = f": {' '.join(str(error).split())}"
        hint = did_you_mean(ON_HOST + name, [prefix + known for known in gymnasium.registry]) or said
        raise ValueError(f"unknown env {ON_HOST + name!r}{hint}") from error


@contextlib.contextmanager
def _explained(name: str, spec: Any) -> Iterator[None]:
    """What importing or making it raises, in one line."""
    try:
        yield
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        said = " ".join(str(error).split(", run")[0].split(", you can")[0].split())
        entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
        extra = ": pip install 'rljax[gymnasium]'" if entry.startswith(IN_EXTRA) else ""
        raise ValueError(f"env {ON_HOST + name!r}: {said}{extra}") from error
    except Exception as error:  # constructors assert, and more
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"env {ON_HOST + name!r} cannot be made with these env_params: {said}") from error


def _translation(observation: Any, action: Any, name: str) -> host.Translation:
    return host.Translation(*_observations(observation, name), *_actions(action, name))


def _observations(space: Any, name: str) -> tuple[Space, Callable[[Any], np.ndarray]]:
    """Our space, and Gymnasium's observations in it; see `host.Translation`."""
    if isinstance(space, spaces.Box):
        box = _box(space)
        return box, lambda x: np.array(x, box.dtype)
    if isinstance(space, spaces.Discrete):

        def from_zero(x: Any) -> np.ndarray:
            places = np.array(x, space.dtype).astype(np.int64) - int(space.start)
            if ((places < 0) | (places >= space.n)).any():
                raise ValueError(f"the observation {x[0]} is outside of {space}")
            return places.astype(np.int32)

        return Discrete(int(space.n)), from_zero
    if isinstance(space, spaces.MultiDiscrete):
        sizes, start = space.nvec.reshape(-1).astype(int), space.start.reshape(-1).astype(int)
        first = np.cumsum(sizes) - sizes

        def one_hot(x: Any) -> np.ndarray:
            chosen = np.array(x, space.dtype)
            if chosen.shape[1:] != space.shape:
                raise ValueError(f"the observation has shape {list(chosen.shape[1:])}, and its space {list(space.shape)}")
            chosen = chosen.reshape(len(chosen), -1).astype(np.int64) - start
            if ((chosen < 0) | (chosen >= sizes)).any():
                raise ValueError(f"the observation {x[0]} is outside of {space}")
            places = np.zeros((len(chosen), sizes.sum()), np.float32)
            np.put_along_axis(places, first + chosen, 1.0, axis=1)
            return places

        return Box(0.0, 1.0, (int(sizes.sum()),)), one_hot
    if isinstance(space, spaces.MultiBinary):
        return Box(0.0, 1.0, tuple(space.shape)), lambda x: np.array(x, np.float32)
    flat = "flatten them, as in rljax.envs.from_gymnasium(lambda: gymnasium.wrappers.FlattenObservation(gymnasium.make(...)))"
    raise ValueError(_unfit(name, "observations", space, flat))


def _actions(space: Any, name: str) -> tuple[Space, Callable[[np.ndarray], np.ndarray]]:
    """Our space, and our actions in Gymnasium's; see `host.Translation`."""
    if isinstance(space, spaces.Box):
        return _box(space), lambda x: x.astype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda x: x.astype(space.dtype) + space.start
    if isinstance(space, spaces.MultiDiscrete):
        sizes = MultiDiscrete(tuple(space.nvec.reshape(-1).tolist()))
        return sizes, lambda x: x.astype(space.dtype).reshape(-1, *space.shape) + space.start
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscrete((2,) * math.prod(space.shape)), lambda x: x.astype(space.dtype).reshape(-1, *space.shape)
    wrapped = (
        "wrap it in a gymnasium.ActionWrapper whose action_space is one of these, and give that to rljax.envs.from_gymnasium"
    )
    raise ValueError(_unfit(name, "actions", space, wrapped))


def _unfit(name: str, what: str, space: Any, way_out: str) -> str:
    kinds = "Box, Discrete, MultiDiscrete or MultiBinary"
    return f"env {name!r}: its {what} are {type(space).__name__}, and must be {kinds}; {way_out}"


def _box(space: spaces.Box) -> Box:
    dtype = jnp.float32 if space.dtype.kind == "f" else jnp.uint8 if space.dtype == np.uint8 else jnp.int32
    return Box(space.low.astype(np.float32), space.high.astype(np.float32), tuple(space.shape), dtype)
