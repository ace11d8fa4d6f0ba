"""Recorded data sets: reading and writing them, judging them, and making them by playing a policy."""

import dataclasses
import importlib
import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.agents import Agent
from rljax.agents.off_policy import transition
from rljax.envs import Box, Discrete, Environment, vectorize
from rljax.envs.spaces import space_text
from rljax.experiment.config import InputError
from rljax.experiment.evaluation import random_agent
from rljax.ops import replay
from rljax.ops.dataset import Dataset, make_dataset

REQUIRED = ("observations", "actions", "rewards", "terminals", "timeouts")
OPTIONAL = ("next_observations", "action_masks", "next_action_masks", "log_probs")
FORMATS = (".npz", ".h5", ".hdf5")


@dataclasses.dataclass(frozen=True)
class Recording:
    """Whole episodes, one after the other, as numpy arrays under the names that D4RL gave them.

    Attributes:
      arrays: ``observations``, ``actions``, ``rewards``, ``terminals`` (bool: terminated) and ``timeouts`` (bool: truncated), and
        optionally ``next_observations``, ``action_masks``, ``next_action_masks`` and ``log_probs``; each ``[N, ...]``.
      about: what is known of them: ``env`` and ``env_params``, ``random_return`` and ``expert_return`` (undiscounted, the anchors
        of normalised scores), ``source``.
    """

    arrays: dict[str, np.ndarray]
    about: dict[str, Any]

    @property
    def size(self) -> int:
        """Steps."""
        return len(self.arrays["rewards"])

    @property
    def ends(self) -> np.ndarray:
        """bool ``[N]``: the last step of an episode, which the last of all is in any case."""
        done = self.arrays["terminals"].astype(bool) | self.arrays["timeouts"].astype(bool)
        return done | (np.arange(self.size) == self.size - 1)

    @property
    def returns(self) -> np.ndarray:
        """float64, the undiscounted return of each episode."""
        last = np.flatnonzero(self.ends)
        upto = np.concatenate([[0.0], np.cumsum(self.arrays["rewards"], dtype=np.float64)])
        return np.diff(upto[np.concatenate([[0], last + 1])])

    def place(self, row: int) -> str:
        """``episode i, step t`` of a row."""
        before = np.flatnonzero(self.ends[:row])
        return f"episode {len(before)}, step {row - (before[-1] + 1 if len(before) else 0)}"


def read(path: str | Path) -> Recording:
    """Reads an ``.npz`` or HDF5 file, or the Minari data set ``minari:NAME``.

    Without ``next_observations`` each is the next row's, and the last step of an episode that did not terminate is left out:
    what it led to is not in the file.

    Raises:
      InputError: no such file, one that cannot be read, or arrays that are missing or do not fit together; names the file, and
        of a wrong number the episode and step.
    """
    name = str(path)
    if name.startswith("minari:"):
        recording = _from_minari(name.removeprefix("minari:"))
    else:
        arrays, about = _load(Path(path))
        recording = Recording(arrays, about)
    missing = [key for key in REQUIRED if key not in recording.arrays]
    if missing:
        raise InputError(f"{name}: has no {missing[0]}; a data set needs {', '.join(REQUIRED)}")
    unknown = sorted(set(recording.arrays) - {*REQUIRED, *OPTIONAL})
    recording = Recording({key: x for key, x in recording.arrays.items() if key not in unknown}, recording.about)
    sizes = {key: len(x) for key, x in recording.arrays.items()}
    if len(set(sizes.values())) > 1 or not sizes["rewards"]:
        counts = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise InputError(f"{name}: the arrays must all have the same number of rows, one or more: {counts}")
    for key in ("rewards", "terminals", "timeouts"):
        if recording.arrays[key].ndim != 1:
            raise InputError(f"{name}: {key} must have one number a step, and has shape {list(recording.arrays[key].shape)}")
    _check_numbers(recording, name)
    return _with_next(recording, name)


def write(recording: Recording, path: str | Path) -> None:
    """Writes ``.npz`` or HDF5, by the suffix, or the Minari data set ``minari:NAME``.

    Minari keeps neither masks nor log-probabilities, and of what is known the anchors and a description.

    Raises:
      InputError: another suffix, an extra that is missing, or a data set that is there already.
    """
    check_target(path)
    if str(path).startswith("minari:"):
        return _to_minari(recording, str(path).removeprefix("minari:"))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = json.dumps(recording.about)
    if path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez_compressed(file, about=np.array(about), **recording.arrays)  # type: ignore[arg-type]
    else:
        with _h5py(path).File(path, "w") as file:
            for key, x in recording.arrays.items():
                file.create_dataset(key, data=x, compression="gzip")
            file.attrs["about"] = about


def check_target(path: str | Path) -> None:
    """Raises InputError where `write` would refuse to write, of what can be told by the name."""
    if str(path).startswith("minari:"):
        if not re.fullmatch(r"minari:[\w./-]+-v\d+", str(path)):
            raise InputError(f"{path}: the name of a data set ends with its version, as in minari:cartpole/medium-v0")
    elif Path(path).suffix not in FORMATS:
        raise InputError(f"{path}: a data set is written to one of {', '.join(FORMATS)}, or minari:NAME")
    elif Path(path).exists():  # runs may have learnt from it
        raise InputError(f"{path}: is there already; take another name, or delete it")


def together(recordings: list[Recording], names: list[str]) -> Recording:
    """One after the other. What is known of them is kept where all agree.

    Raises:
      InputError: arrays of other shapes.
    """
    first = recordings[0]
    for name, other in zip(names, recordings, strict=True):
        for key in first.arrays.keys() | other.arrays.keys():
            shapes = [r.arrays[key].shape[1:] if key in r.arrays else None for r in (first, other)]
            if shapes[0] != shapes[1] and key != "log_probs":
                raise InputError(f"{name}: its {key} do not fit those of {names[0]}: {shapes[1]} and {shapes[0]}")
    joined: dict[str, np.ndarray] = {}
    for key in first.arrays:
        if all(key in r.arrays for r in recordings):
            joined[key] = np.concatenate([_ended(r)[key] for r in recordings])
    about = {key: value for key, value in first.about.items() if all(r.about.get(key) == value for r in recordings)}
    return Recording(joined, about)


def load_data(names: tuple[str, ...], env: Environment) -> tuple[Dataset, dict[str, Any]]:
    """The data sets of these files, one after the other, as numpy arrays for an agent that plays in ``env``; and what is known
    of them.

    Raises:
      InputError: see `read`; observations or actions that are not the environment's.
    """
    recordings = [read(name) for name in names]
    for name, recording in zip(names, recordings, strict=True):
        _check_spaces(recording, env, name)
        _check_masks(recording, env, name)
    whole = together(recordings, list(names))
    x = whole.arrays
    dtypes = env.observation_space.dtype, env.action_space.dtype
    columns: dict[str, Any] = {
        "observation": x["observations"].astype(dtypes[0]),
        "action_mask": x.get("action_masks"),
        "action": x["actions"].astype(dtypes[1]),
        "reward": x["rewards"].astype(np.float32),
        "terminated": x["terminals"].astype(bool),
        "truncated": x["timeouts"].astype(bool) & ~x["terminals"].astype(bool),
        "next_observation": x["next_observations"].astype(dtypes[0]),
        "next_action_mask": x.get("next_action_masks"),
    }
    return make_dataset(replay.Transition(**columns), x.get("log_probs")), whole.about


def _load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; `rljax record` makes a data set from a run")
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: a data set is one of {', '.join(FORMATS)}, or minari:NAME")
    try:
        if path.suffix == ".npz":
            loaded = np.load(path)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            with loaded as file:
                arrays = {key: file[key] for key in file.files}
            about = str(arrays.pop("about")) if "about" in arrays else "{}"
        else:
            with _h5py(path).File(path, "r") as file:
                arrays = {key: np.asarray(file[key]) for key in file if hasattr(file[key], "shape")}
                about = str(file.attrs.get("about", "{}"))
        known = json.loads(about)
        if not isinstance(known, dict):
            raise ValueError("about must be a JSON object")
        return arrays, known
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path} cannot be read as a data set: {error}") from error


def _h5py(path: Path) -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise InputError(f"{path}: HDF5 needs the extra: pip install 'rljax[data]'") from error


def _minari(name: str) -> Any:
    try:
        return importlib.import_module("minari")
    except ImportError as error:
        raise InputError(f"minari:{name}: needs the extra: pip install 'rljax[data]'") from error


def _to_minari(recording: Recording, name: str) -> None:
    minari = _minari(name)
    spaces: Any = importlib.import_module("gymnasium.spaces")
    EpisodeBuffer: Any = importlib.import_module("minari.data_collector").EpisodeBuffer
    x, about = recording.arrays, recording.about

    def space(key: str) -> Any:
        values, shape = x[key], x[key].shape[1:]
        if np.issubdtype(values.dtype, np.integer) and not shape:
            return spaces.Discrete(int(values.max()) + 1)
        return spaces.Box(-np.inf, np.inf, shape, values.dtype.type)

    episodes, first = [], 0
    for last in np.flatnonzero(recording.ends):
        rows = slice(first, last + 1)
        ended = _ended(Recording({key: values[rows] for key, values in x.items()}, {}))
        observations = np.concatenate([ended["observations"], ended["next_observations"][-1:]])
        flags = {"terminations": ended["terminals"].astype(bool), "truncations": ended["timeouts"].astype(bool)}
        columns = {"observations": observations, "actions": ended["actions"], "rewards": ended["rewards"], **flags}
        episodes.append(EpisodeBuffer(id=len(episodes), **columns))
        first = last + 1
    anchors = {"ref_min_score": about.get("random_return"), "ref_max_score": about.get("expert_return")}
    anchors = {key: value for key, value in anchors.items() if value is not None}
    description = ", ".join(f"{key}: {about[key]}" for key in ("env", "env_params", "source", "epsilon") if about.get(key))
    known = {"observation_space": space("observations"), "action_space": space("actions"), "description": description}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nobody named an author
            made = minari.create_dataset_from_buffers(dataset_id=name, buffer=episodes, algorithm_name="rljax", **known)
            made.storage.update_metadata(anchors)  # which minari keeps by itself for environments of gymnasium alone
    except Exception as error:  # minari raises of many kinds, of names too
        raise InputError(f"minari:{name}: {error}") from error


def _from_minari(name: str) -> Recording:
    minari = _minari(name)
    try:
        found = minari.load_dataset(name)
    except Exception as error:
        raise InputError(f"minari:{name}: {error}; `minari download {name}` fetches it") from error
    columns: dict[str, list[np.ndarray]] = {key: [] for key in (*REQUIRED, "next_observations")}
    for episode in found.iterate_episodes():
        observations = np.asarray(episode.observations)
        if observations.dtype == object or isinstance(episode.observations, dict | tuple):
            raise InputError(f"minari:{name}: its observations are no single arrays")
        columns["observations"].append(observations[:-1])
        columns["next_observations"].append(observations[1:])
        columns["actions"].append(np.asarray(episode.actions))
        columns["rewards"].append(np.asarray(episode.rewards))
        columns["terminals"].append(np.asarray(episode.terminations))
        columns["timeouts"].append(np.asarray(episode.truncations))
    about = {"source": f"minari:{name}"}
    low, high = (found.storage.metadata.get(key) for key in ("ref_min_score", "ref_max_score"))
    if low is not None and high is not None:
        about |= {"random_return": float(low), "expert_return": float(high)}
    return Recording({key: np.concatenate(x) for key, x in columns.items()}, about)


def _check_numbers(recording: Recording, name: str) -> None:
    for key, x in recording.arrays.items():
        if not (np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating) or x.dtype == bool):
            raise InputError(f"{name}: {key} must be numbers, and are {x.dtype}")
        rows = x.reshape(len(x), -1)
        if key in ("terminals", "timeouts"):
            bad, what = ~np.isin(rows, (0, 1)).all(1), "must be 0 or 1"
        elif key == "log_probs" or not np.issubdtype(x.dtype, np.floating):
            continue
        else:
            with np.errstate(over="ignore"):
                bad, what = ~np.isfinite(rows.astype(np.float32)).all(1), "hold a number that is not finite in float32"
        if bad.any():
            raise InputError(f"{name}: {recording.place(int(bad.argmax()))}: {key} {what}")


def _check_masks(recording: Recording, env: Environment, name: str) -> None:
    """Of masks, and that recorded actions were legal."""
    x, actions = recording.arrays, env.action_space
    number = (actions.n,) if isinstance(actions, Discrete) else None
    for key in ("action_masks", "next_action_masks"):
        if key not in x:
            continue
        if number is None:
            raise InputError(f"{name}: {key} are of Discrete actions, and the environment's are not; leave them out")
        if x[key].shape[1:] != number:
            raise InputError(f"{name}: {key} have shape {list(x[key].shape[1:])}, and should have {list(number)}")
    if "action_masks" in x:
        legal = np.take_along_axis(x["action_masks"].astype(bool), x["actions"].astype(int)[:, None], 1)[:, 0]
        if not legal.all():
            row = int((~legal).argmax())
            raise InputError(f"{name}: {recording.place(row)}: action {x['actions'][row]} is not legal by action_masks")


def _with_next(recording: Recording, name: str) -> Recording:
    """With what every step led to, and without the steps of which that is not known."""
    x = recording.arrays
    inside = ~recording.ends
    after = np.concatenate([x["observations"][1:], x["observations"][-1:]])
    if "next_observations" in x:
        if x["next_observations"].shape != after.shape:
            shapes = f"{list(x['next_observations'].shape[1:])}, and observations {list(after.shape[1:])}"
            raise InputError(f"{name}: next_observations have shape {shapes}")
        differs = inside & (x["next_observations"] != after).reshape(len(after), -1).any(1)
        if differs.any():
            row = int(differs.argmax())
            raise InputError(
                f"{name}: {recording.place(row)}: next_observations are not the observations of the step after it, and no "
                "terminals or timeouts say that an episode ends there"
            )
        return recording
    terminals = x["terminals"].astype(bool)
    keep = inside | terminals
    if not keep.any():
        raise InputError(f"{name}: has no next_observations, and no two steps of one episode to take them from")
    timeouts = x["timeouts"].astype(bool)
    # The step before one that is left out is now the last that is known of its episode.
    timeouts = timeouts | np.concatenate([(~keep)[1:], [False]])
    arrays = {**x, "next_observations": after, "timeouts": timeouts}
    if "action_masks" in x and "next_action_masks" not in x:
        arrays["next_action_masks"] = np.concatenate([x["action_masks"][1:], x["action_masks"][-1:]])
    return Recording({key: value[keep] for key, value in arrays.items()}, recording.about)


def _ended(recording: Recording) -> dict[str, np.ndarray]:
    """Arrays in which the last episode ends, so that it is not joined to what comes after."""
    timeouts = recording.arrays["timeouts"].astype(bool)
    timeouts[-1] |= not recording.arrays["terminals"][-1]
    return {**recording.arrays, "timeouts": timeouts}


def _check_spaces(recording: Recording, env: Environment, name: str) -> None:
    for key, space in (("observations", env.observation_space), ("actions", env.action_space)):
        x = recording.arrays[key]
        if not isinstance(space, Box | Discrete):
            raise InputError(
                f"{name}: data sets are of Box and Discrete spaces, and the environment's {key} are {space_text(space)}"
            )
        if x.shape[1:] != tuple(space.shape):
            raise InputError(f"{name}: {key} have shape {list(x.shape[1:])}, and the environment's {list(space.shape)}")
        if isinstance(space, Discrete):
            outside = (x < 0) | (x >= space.n) | (x != np.round(x))
        elif key == "actions":
            low, high = (np.broadcast_to(np.asarray(bound, np.float64), x.shape[1:]) for bound in (space.low, space.high))
            slack = 1e-5 * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
            outside = ((x < low - slack) | (x > high + slack)).reshape(len(x), -1).any(1)
        else:
            continue
        if outside.any():
            row = int(outside.argmax())
            raise InputError(
                f"{name}: {recording.place(row)}: {key} {x[row]} lie outside of the environment's {space_text(space)}"
            )


def play(agent: Agent, state: Any, env: Environment, key: Array, steps: int, num_envs: int, epsilon: float) -> dict[str, Any]:
    """The arrays of a `Recording`: ``num_envs`` environments side by side, ``steps`` steps in all, rounded up to as many of each.

    Args:
      agent: its actions are drawn, as in training.
      epsilon: probability that a step takes a uniformly random legal action instead.
    """
    envs, drawn = vectorize(env, num_envs), random_agent(env)
    length = -(-steps // num_envs)

    def one(loop: Any, key: Array) -> Any:
        (env_state, timestep), carry = loop
        act_key, random_key, coin_key, env_key = jax.random.split(key, 4)
        carry, action = agent.act(state, carry, timestep, act_key, False)
        random = drawn.act((), (), timestep, random_key, False)[1]
        coin = jax.random.bernoulli(coin_key, epsilon, (num_envs,))
        action = jnp.where(coin.reshape(-1, *(1,) * (action.ndim - 1)), random, action)
        env_state, after = envs.step(env_key, env_state, action)
        return ((env_state, after), carry), transition(timestep, action, after)

    @jax.jit
    def record(key: Array) -> replay.Transition:
        reset_key, run_key = jax.random.split(key)
        world = envs.reset(reset_key)
        return jax.lax.scan(one, (world, agent.start(state, world[1])), jax.random.split(run_key, length))[1]

    rows = jax.device_get(record(key))
    rows = jax.tree.map(lambda x: np.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), rows)
    # The last episode of each environment is cut where the recording ends.
    truncated = np.array(rows.truncated)
    truncated[length - 1 :: length] = True
    found = {
        "observations": rows.observation,
        "actions": rows.action,
        "rewards": rows.reward,
        "terminals": rows.terminated,
        "timeouts": truncated & ~rows.terminated,
        "next_observations": rows.next_observation,
        "action_masks": rows.action_mask,
        "next_action_masks": rows.next_action_mask,
    }
    return {name: x for name, x in found.items() if x is not None}
