"""Experiment configs: TOML with inheritance, command-line overrides, one validator for both.

A config is flattened to dotted keys, each with where it came from, so that every error is one line that names the key, the
file or flag, and the fix.
"""

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import random
import tomllib
import typing
from pathlib import Path
from typing import Any

import tomli_w

from rljax.agents.base import agent_module, agent_name, agent_names
from rljax.envs.host import ON_HOST
from rljax.envs.registry import WRAPPERS, env_parameters, takes_traced
from rljax.envs.wrappers import check_range as check_drawn
from rljax.experiment import devices
from rljax.networks import Transformer
from rljax.options import check_range, convert, did_you_mean, is_number, range_text, static

SECTIONS = ("model", "algo", "env_params", "sweep")
SOURCES = ("start_from", "reward_from")  # keys that name an experiment which runs first
MOST_DRAWS = 10_000
SWEEP_OPTIONS = {  # of [sweep]; its other keys are what is swept
    "mode": str,
    "draws": int,
    "seed": int,
    "halving": tuple[int, ...],
    "keep": float,
}


class InputError(ValueError):
    """Wrong input: one line that names the key and the fix. The command exits with status 2."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A resolved experiment: every default is filled in.

    ``start_from`` and ``reward_from`` are experiments of their own, which run first, on the seeds of this one: where the
    parameters begin, and the reward model that pays.
    ``sweep`` maps dotted keys (``algo.*``, ``env_params.*``) to lists of values, and ``sweep_mode`` says which of them go
    together: ``grid``, all with all, or ``list``, the first of each, then the second. `programs` splits it into programs and
    `lanes` lists the lanes of one. After the evaluations ``sweep_halving`` the share ``sweep_keep`` of the settings goes on.
    """

    env: str = static("", "environment, see `rljax list`")
    total_steps: int = static(0, "environment steps per seed; rounded up to whole chunks of updates", low=1, high=10**13)
    seeds: tuple[int, ...] = static((0, 1, 2, 3, 4), "one lane each; five or more to state a spread", low=0, high=2**32 - 1)
    evals: int = static(20, "greedy evaluations during training, the last at its end", low=1)
    eval_episodes: int = static(128, "episodes of each evaluation, per lane", low=1)
    eval_max_steps: int = static(100_000, "an evaluation episode that is still going then counts as unfinished", low=1)
    eval_seed: int = static(0, "fixes the evaluation episodes, the same for all lanes and evaluations", low=0, high=2**32 - 1)
    checkpoint_seconds: float = static(60.0, "least time between two checkpoints; 0: one after every chunk", low=0)
    shard: str = static(
        "lanes",
        "what devices divide: lanes; the environments, prompts and minibatches of each lane; or its parameters as well",
        choices=("lanes", "envs", "params"),
    )
    data: tuple[str, ...] = static(
        (), "recorded data sets that an offline agent learns from, one after the other: .npz, HDF5 or minari:NAME"
    )
    data_digest: tuple[str, ...] = static((), "of what each of them held when the config was read; filled in")
    name: str = static("", "of the run directory; the file's name by default")
    out: str = static("runs", "where run directories are made")
    start_from: "Experiment | None" = None
    reward_from: "Experiment | None" = None
    env_params: dict[str, Any] = dataclasses.field(default_factory=dict)
    algo: Any = None
    sweep: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    sweep_mode: str = "grid"
    sweep_halving: tuple[int, ...] = ()
    sweep_keep: float = 0.5

    @property
    def algo_name(self) -> str:
        return agent_name(self.algo)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out; what ``config.toml`` holds."""
        data = {name: getattr(self, name) for name in _top_fields()}
        algo = {f.name: getattr(self.algo, f.name) for f in dataclasses.fields(self.algo)}
        model = algo.pop("model", None)
        data |= {key: source.to_dict() for key in SOURCES if (source := getattr(self, key)) is not None}
        sweep: dict[str, Any] = dict(self.sweep)
        if sweep and self.sweep_mode != "grid":
            sweep["mode"] = self.sweep_mode
        if sweep and self.sweep_halving:
            sweep |= {"halving": self.sweep_halving, "keep": self.sweep_keep}
        data |= {"algo": {"name": self.algo_name, **algo}, "env_params": self.env_params, "sweep": sweep}
        if model is not None:
            data["model"] = dataclasses.asdict(model)
        return _plain(data)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    @property
    def hash(self) -> str:
        """Twelve hex digits of what decides the result: all of the config but ``name``, ``out``, ``checkpoint_seconds``,
        ``shard``, and the places of data sets, of which the contents count."""

        def decisive(data: dict[str, Any]) -> dict[str, Any]:
            aside = {"name", "out", "checkpoint_seconds", "shard", "data"} | ({"data_digest"} if not data["data"] else set())
            kept = {k: v for k, v in data.items() if k not in aside}
            return {k: decisive(v) if k in SOURCES else v for k, v in kept.items()}

        data = decisive(self.to_dict())
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.out) / self.name / self.hash

    def is_traced(self, key: str) -> bool:
        """Whether lanes of one program can differ in ``key``: an algorithm's traced field, or a float of the environment."""
        section, name = key.split(".", 1)
        if section == "model":
            return False
        if section == "algo":
            fields = {f.name: f for f in dataclasses.fields(self.algo)}
            return fields[name].metadata["traced"] and None not in self.sweep.get(key, ())
        is_numeric = all(is_number(value) for value in self.sweep.get(key, ()))
        return is_numeric and takes_traced(self.env, name, self.env_params)

    def settings(self) -> list[dict[str, Any]]:
        """The combinations of swept values."""
        zipped = self.sweep and self.sweep_mode == "list"
        rows = zip(*self.sweep.values(), strict=True) if zipped else itertools.product(*self.sweep.values())
        return [dict(zip(self.sweep, row, strict=True)) for row in rows]

    def programs(self) -> list["Experiment"]:
        """One experiment for each combination of swept static values; what is left in ``sweep`` are traced axes."""
        static_keys = [key for key in self.sweep if not self.is_traced(key)]
        traced_keys = [key for key in self.sweep if key not in static_keys]
        groups: dict[str, list[dict[str, Any]]] = {}
        for setting in self.settings():
            groups.setdefault(repr([setting[key] for key in static_keys]), []).append(setting)
        programs = []
        for rows in groups.values():
            columns = {key: tuple(row[key] for row in rows) for key in traced_keys}
            axes = columns if self.sweep_mode == "list" else {key: self.sweep[key] for key in traced_keys}
            fixed = self._with({key: rows[0][key] for key in static_keys})
            program = dataclasses.replace(fixed, sweep=axes, sweep_mode=self.sweep_mode if axes else "grid")
            halves = len(program.settings()) > 1
            programs.append(program if halves else dataclasses.replace(program, sweep_halving=(), sweep_keep=0.5))
        return programs

    def lanes(self) -> list[dict[str, Any]]:
        """Lanes of one program: ``{"lane", "seed", **swept values}``, seeds varying fastest."""
        pairs = itertools.product(self.settings(), self.seeds)
        return [{"lane": i, "seed": seed, **setting} for i, (setting, seed) in enumerate(pairs)]

    @property
    def rungs(self) -> list[int]:
        """How many settings there are at first, and after each evaluation of ``sweep_halving``."""
        counts = [len(self.settings())]
        for _ in self.sweep_halving:
            counts.append(math.ceil(round(counts[-1] * self.sweep_keep, 9)))
        return counts

    @property
    def lanes_a_call(self) -> int:
        """Those of the last rung, for which the program is compiled."""
        return self.rungs[-1] * len(self.seeds)

    def value(self, key: str) -> Any:
        """That of a dotted key of ``algo``, ``model`` or ``env_params``."""
        section, name = key.split(".", 1)
        if section == "env_params":
            return self.env_params.get(name)
        return getattr(self.algo if section == "algo" else self.algo.model, name)

    def _with(self, values: dict[str, Any]) -> "Experiment":
        algo = {key[5:]: value for key, value in values.items() if key.startswith("algo.")}
        params = {key[11:]: value for key, value in values.items() if key.startswith("env_params.")}
        model = {key[6:]: value for key, value in values.items() if key.startswith("model.")}
        try:
            if model:
                algo["model"] = dataclasses.replace(self.algo.model, **model)
        except ValueError as error:
            raise InputError(str(error)) from error
        return dataclasses.replace(self, algo=dataclasses.replace(self.algo, **algo), env_params={**self.env_params, **params})


def load(path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> Experiment:
    """Reads a TOML config, follows ``base``, applies ``overrides`` and validates.

    Args:
      path: a ``.toml`` file, or the directory of a run; None starts from the defaults.
      overrides: dotted keys to values, as in ``{"algo.learning_rate": 1e-3, "seeds": [0, 1, 2]}``.

    Raises:
      InputError: a missing or malformed file, an unknown key, a wrong type or range; one line that says what and where.
    """
    devices.prepare()  # gymnax starts jax when it is imported
    entries: dict[str, tuple[Any, str]] = {}
    name = "run"
    if path is not None:
        path = Path(path)
        file = path / "config.toml" if path.is_dir() else path
        name = file.stem
        entries = _read(file, ())
        if path.is_dir():  # the run is where it is, whatever the working directory was when it began
            place = path.absolute().parent
            entries |= {"out": (str(place.parent), str(path)), "name": (place.name, str(path))}
    for key, value in (overrides or {}).items():
        key = key.replace("-", "_")
        entries[key] = (_as_python(value), "override")
        swept = entries.pop(f"sweep.{key}", None)  # one value in place of those that a file sweeps
        entries = entries if swept is None else _without_idle_options(entries)
    return _resolve(entries, name)


def elsewhere(experiment: Experiment, overrides: dict[str, Any]) -> Experiment:
    """``experiment`` in another environment: ``env`` and ``env_params.*`` of ``overrides`` replace its own, swept ones too.

    An environment of another name begins with its own defaults. What runs first is left out.

    Raises:
      InputError: any other key; what `load` raises for these.
    """
    overrides = {key.replace("-", "_"): value for key, value in overrides.items()}
    for key in overrides:
        if key != "env" and not key.startswith("env_params."):
            raise InputError(f"override: {key}: an evaluation can change env and env_params.KEY alone; see `rljax eval --help`")
    is_other = overrides.get("env", experiment.env) != experiment.env

    def stays(key: str) -> bool:
        param = key.removeprefix("sweep.")
        return key not in SOURCES and param not in overrides and not (is_other and param.startswith("env_params."))

    entries = {key: entry for key, entry in _flatten(experiment.to_dict(), "config.toml").items() if stays(key)}
    if experiment.sweep_mode == "list":  # settings may be the same but for what is replaced
        left = [key for key in experiment.sweep if f"sweep.{key}" in entries]
        rows = dict.fromkeys(tuple(setting[key] for key in left) for setting in experiment.settings())
        entries |= {
            f"sweep.{key}": (list(column), "config.toml") for key, column in zip(left, zip(*rows, strict=True), strict=True)
        }
    entries = _without_idle_options(entries)
    return _resolve(entries | {key: (_as_python(value), "override") for key, value in overrides.items()}, experiment.name)


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """``["--algo.learning-rate", "1e-3", "--seeds", "0", "1"]`` to dotted keys and values.

    Values are read as TOML where they parse as such, else as text; several values make a list. ``--key=value`` works too.

    Raises:
      InputError: a value without a key, or a key without a value.
    """
    overrides: dict[str, Any] = {}
    key = None
    for argument in arguments:
        if argument.startswith("--"):
            key, _, value = argument[2:].partition("=")
            key = key.replace("-", "_")
            overrides[key] = [_literal(value)] if value else []
        elif key is None:
            raise InputError(f"unexpected argument {argument!r}; overrides look like --algo.learning-rate 1e-3")
        else:
            overrides[key].append(_literal(argument))
    for key, values in overrides.items():
        if not values:
            raise InputError(f"--{key}: a value is missing")
        if len(values) == 1 and (not _is_axis(key) or isinstance(values[0], dict)):
            overrides[key] = values[0]
    return overrides


def describe(experiment: Experiment) -> list[tuple[str, str, str]]:
    """``(dotted key, value, help)`` of every option, as resolved for ``experiment``."""
    rows = [(f.name, getattr(experiment, f.name), f.metadata) for f in _top_fields().values()]
    algo = {f.name: f for f in dataclasses.fields(experiment.algo)}
    if algo.pop("model", None) is not None:
        model = experiment.algo.model or Transformer()
        rows += [(f"model.{f.name}", getattr(model, f.name), f.metadata) for f in dataclasses.fields(model)]
    rows += [(f"algo.{name}", getattr(experiment.algo, name), f.metadata) for name, f in algo.items()]
    options = [
        (
            key,
            json.dumps(_plain(value)),
            meta["doc"] + f": {range_text(meta)}" * bool(range_text(meta)) + (" [traced]" if meta["traced"] else ""),
        )
        for key, value, meta in rows
    ]
    runs = [(key, source.name if (source := getattr(experiment, key)) else "none") for key in SOURCES]
    others = [("algo.name", experiment.algo_name, f"the agent: {', '.join(agent_names())}")]
    others += [(key, name, "a config, or a run directory, that runs first; see docs/config.md") for key, name in runs]
    options = [*((key, json.dumps(value), doc) for key, value, doc in others), *options]
    is_on_host = experiment.env.startswith(ON_HOST)
    for key, default in {**env_parameters(experiment.env), **WRAPPERS}.items():
        value = experiment.env_params.get(key, "none" if key in WRAPPERS else default)
        options.append(
            (
                f"env_params.{key}",
                str(value),
                "of the environment" + (" [traced]" * (isinstance(default, float) and not is_on_host)),
            )
        )
    return options


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, tuple[Any, str]]:
    """Flattened entries of a file and, under them, of its base."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read config {path}: {error.strerror}") from error
    except ValueError as error:  # TOML's own, and Python's of a number with thousands of digits
        raise InputError(f"{path}: not valid TOML: {error}") from error
    entries: dict[str, tuple[Any, str]] = {}
    base = data.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise InputError(f"{path}: base must be the name of a file, got {base!r}")
        base_path = (path.parent / base).resolve()
        if base_path in (*seen, path.resolve()):
            raise InputError(f"{path}: base {base!r} leads back to itself")
        entries = _read(base_path, (*seen, path.resolve()))
    own = _flatten(data, str(path))
    if "algo.name" in own and own["algo.name"][0] != entries.get("algo.name", own["algo.name"])[0]:
        entries = {k: v for k, v in entries.items() if not k.startswith("algo.")}
    return entries | own


def _flatten(data: dict[str, Any], origin: str) -> dict[str, tuple[Any, str]]:
    entries: dict[str, tuple[Any, str]] = {}
    for key, value in data.items():
        if key not in SECTIONS:
            entries[key] = (value, origin)
            continue
        if not isinstance(value, dict):
            raise InputError(f"{origin}: {key} must be a table, [{key}], got {value!r}")
        for name, item in value.items():
            if key == "sweep" and name in SECTIONS and isinstance(item, dict):  # [sweep.algo] learning_rate = [...]
                entries |= {f"sweep.{name}.{n}": (v, origin) for n, v in item.items()}
            else:
                entries[f"{key}.{name}"] = (item, origin)
    return entries


def _resolve(entries: dict[str, tuple[Any, str]], name: str) -> Experiment:
    top = _top_fields()
    algo_name, origin = entries.pop("algo.name", ("ppo", "default"))
    try:
        config_class = agent_module(str(algo_name)).Config
    except ValueError as error:
        raise InputError(f"{origin}: {error}") from error
    algo = {f"algo.{f.name}": f for f in dataclasses.fields(config_class)}
    takes_model = algo.pop("algo.model", None) is not None
    if takes_model:
        algo |= {f"model.{f.name}": f for f in dataclasses.fields(Transformer)}
    elif model_keys := [key for key in entries if key.removeprefix("sweep.").startswith("model.")]:
        raise InputError(f"{entries[model_keys[0]][1]}: {model_keys[0]}: algo.name {algo_name!r} has no transformer")
    hints = {
        **typing.get_type_hints(Experiment),
        **{f"algo.{k}": v for k, v in typing.get_type_hints(config_class).items()},
        **{f"model.{k}": v for k, v in typing.get_type_hints(Transformer).items()},
    }
    fields = {**top, **algo}
    known = [*fields, "algo.name", *SOURCES]

    def field(key: str, value: Any, origin: str) -> Any:
        value = _convert(key, value, hints[key], origin)
        try:
            check_range(key, value, fields[key].metadata)
        except ValueError as error:
            raise InputError(f"{origin}: {error}") from error
        return value

    values: dict[str, Any] = {}
    sources = {name: {key: entries.pop(key) for key in list(entries) if key.partition(".")[0] == name} for name in SOURCES}
    draw = _Draw.of({key: entries.pop(f"sweep.{key}") for key in SWEEP_OPTIONS if f"sweep.{key}" in entries}, entries)
    env_entries = {key: entry for key, entry in entries.items() if key.split(".")[-2:-1] == ["env_params"]}
    for key, (value, origin) in entries.items():
        if key in env_entries:
            continue
        swept = key.removeprefix("sweep.")
        if swept != key and swept in algo:
            is_whole = int in (hints[swept], *typing.get_args(hints[swept]))
            items = draw.values(key, value, origin, is_whole)
            for end in draw.ends(value):
                field(swept, end, origin)  # so that it does not depend on the draw whether one is out of range
            values[key] = tuple(field(swept, v, origin) for v in items)
        elif swept == key and key in fields:
            values[key] = field(key, value, origin)
        elif swept in (*top, "algo.name"):
            raise InputError(f"{origin}: {key}: algo.*, model.* and env_params.* can be swept, not {swept}")
        elif key in (*SECTIONS, "base"):
            raise InputError(f"{origin}: {key} is of files; here its keys are given apart, as in --sweep.algo.clip 0.1 0.2")
        else:
            options = [f"sweep.{k}" for k in (*algo, *SWEEP_OPTIONS)] if swept != key else known
            raise InputError(f"{origin}: unknown key {key}{did_you_mean(key, options)}")
    for key in ("env", "total_steps"):
        if key not in values:
            raise InputError(
                f"the config must set {key}, as in {'env' if key == 'env' else key} = "
                + ('"CartPole-v1"' if key == "env" else "500_000")
            )
    try:
        env_known = {**WRAPPERS, **env_parameters(values["env"])}
    except ValueError as error:
        raise InputError(f"{entries['env'][1]}: {error}") from error
    for key, (value, origin) in env_entries.items():
        param = key.split(".")[-1]
        if param not in env_known:
            near = did_you_mean(param, list(env_known))
            raise InputError(f"{origin}: unknown key {key}: {values['env']} has no parameter {param!r}{near}")
        swept = key.startswith("sweep.")
        is_whole = isinstance(env_known[param], int) and not isinstance(env_known[param], bool)
        items = draw.values(key, value, origin, is_whole) if swept else [value]
        items = [_env_value(key, item, env_known[param], origin) for item in items]
        values[key] = tuple(items) if swept else items[0]
        if param in WRAPPERS and not swept and items[0] is None:
            del values[key]

    run_name, out = values.get("name", name), values.get("out", Experiment.out)
    if not run_name or "\0" in run_name or run_name in (".", "..") or "/" in run_name:
        raise InputError(f"name must be that of a directory in `out`, without / in it, got {run_name!r}")
    if not out or "\0" in out:
        raise InputError(f"out must be a directory, got {out!r}")
    seeds = values.get("seeds", Experiment.seeds)
    if len(set(seeds)) != len(seeds) or not seeds:
        raise InputError(f"{entries['seeds'][1]}: seeds must hold one or more different numbers, got {list(seeds)}")
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        if rest:
            sections[section][rest] = value
    settings = sections["algo"]
    if "anneal_steps" in {f.name for f in dataclasses.fields(config_class)}:
        settings.setdefault("anneal_steps", None)
        if settings["anneal_steps"] is None:
            settings["anneal_steps"] = float(values["total_steps"])
    top_values = {key: value for key, value in values.items() if key in top}
    if top_values.get("data"):
        files = _places(top_values["data"], entries["data"][1])
        found = tuple(map(digest, files))
        for file, old, new in zip(files, top_values.get("data_digest") or found, found, strict=False):
            if old != new:
                raise InputError(f"data: {file} has changed: it was {old}, and is {new}; the run learnt from the old one")
        top_values |= {"data": files, "data_digest": found}
    elif top_values.get("data_digest"):
        raise InputError(f"{entries['data_digest'][1]}: data_digest is filled in by rljax; set data alone")
    try:
        if sections["model"] or any(key.startswith("model.") for key in sections["sweep"]):
            default: Any = next(f.default for f in dataclasses.fields(config_class) if f.name == "model") or Transformer()
            settings["model"] = dataclasses.replace(default, **_with_sizes(sections["model"]))
        algo_config = config_class(**settings)
    except (ValueError, RuntimeError) as error:
        raise InputError(str(error)) from error
    experiment = Experiment(
        **{"name": name, **top_values},
        env_params=sections["env_params"],
        algo=algo_config,
        **draw.settings(dict(sorted(sections["sweep"].items()))),
    )
    experiment = dataclasses.replace(experiment, **{key: _source(key, own, experiment) for key, own in sources.items()})
    for before, after in itertools.pairwise(experiment.rungs):
        if before == after > 1:
            raise InputError(f"sweep.keep: {experiment.sweep_keep:g} of {before} settings drops none; take less")
    if experiment.reward_from is not None and experiment.reward_from.algo_name != "reward_model":
        raise InputError(f"reward_from: {experiment.reward_from.name} is not of algo.name reward_model, which alone can pay")
    return experiment


@dataclasses.dataclass(frozen=True)
class _Draw:
    """How the values of ``[sweep]`` go together: its options, with where each came from."""

    mode: str = "grid"
    draws: int = 0
    seed: int = 0
    halving: tuple[int, ...] = ()
    keep: float = 0.5
    origin: str = ""

    @classmethod
    def of(cls, options: dict[str, tuple[Any, str]], entries: dict[str, Any]) -> "_Draw":
        found = {key: _convert(f"sweep.{key}", value, SWEEP_OPTIONS[key], origin) for key, (value, origin) in options.items()}
        if not found:
            return cls()
        origin = next(iter(options.values()))[1]
        made = cls(**found, origin=origin)
        if not any(key.startswith("sweep.") for key in entries):
            raise InputError(
                f'{origin}: sweep.{next(iter(found))}: nothing is swept; list values, as in "algo.clip" = [0.1, 0.2]'
            )
        if made.mode not in ("grid", "list", "random"):
            raise InputError(f"{origin}: sweep.mode must be one of grid, list, random, got {made.mode!r}")
        if made.mode != "random" and (extra := [key for key in ("draws", "seed") if key in found]):
            raise InputError(f'{options[extra[0]][1]}: sweep.{extra[0]} is of sweep.mode = "random"; leave it out, or set that')
        if "keep" in found and not (made.halving and 0 < made.keep < 1):
            wanted = "above 0 and below 1, the share of settings that goes on" if made.halving else "set with sweep.halving"
            raise InputError(f"{options['keep'][1]}: sweep.keep must be {wanted}, got {made.keep}")
        if any(b <= a for a, b in itertools.pairwise((0, *made.halving))):
            raise InputError(
                f"{options['halving'][1]}: sweep.halving must hold numbers of evaluations, from 1 on and in their order, "
                f"got {list(made.halving)}"
            )
        if made.mode == "random" and not 1 <= made.draws <= MOST_DRAWS:
            raise InputError(f"{origin}: sweep.draws must be from 1 to {MOST_DRAWS:,}, so many settings, got {made.draws:,}")
        return made

    def ends(self, value: Any) -> list[Any]:
        """Those of a range that is drawn from, as far as it is one; `values` says where it is not."""
        ends = next(iter(value.values()), None) if self.mode == "random" and isinstance(value, dict) else None
        return [end for end in ends if is_number(end)] if isinstance(ends, list | tuple) else []

    def values(self, key: str, value: Any, origin: str, is_whole: bool) -> list[Any]:
        """Those of one swept key: as they are listed, or drawn."""
        if self.mode != "random":
            if isinstance(value, dict):
                raise InputError(f'{origin}: {key} is a range, {value!r}, which only sweep.mode = "random" draws from')
            return _as_list(key, value, origin, self.mode == "list")
        rng = random.Random(f"{self.seed} {key}")  # of its own, so that more draws, or other keys, keep those there were
        if not isinstance(value, dict):
            choices = _as_list(key, value, origin)
            return [choices[int(rng.random() * len(choices))] for _ in range(self.draws)]
        (name, ends), *more = [*value.items()] or [("", None)]
        is_range = isinstance(ends, list | tuple) and len(ends) == 2 and all(map(is_number, ends)) and ends[0] < ends[1]
        if more or name not in ("uniform", "log_uniform") or not is_range:
            raise InputError(
                f"{origin}: {key} must be a list of values to draw from, {{ uniform = [low, high] }} or "
                f"{{ log_uniform = [low, high] }}, got {value!r}"
            )
        low, high = ends
        if name == "log_uniform" and low <= 0:
            raise InputError(f"{origin}: {key}: log_uniform must begin above 0, got {low!r}")
        if is_whole and (low != int(low) or high != int(high)):
            raise InputError(f"{origin}: {key} must have whole numbers as its ends, got {value!r}")
        scale, back = (math.log, math.exp) if name == "log_uniform" else (float, float)
        start, width = scale(low), scale(high + is_whole) - scale(low)
        drawn = [back(start + width * rng.random()) for _ in range(self.draws)]
        shaped = [math.floor(x) if is_whole else float(f"{x:.4g}") for x in drawn]  # four digits can be typed again
        return [min(max(x, low), high) for x in shaped]

    def settings(self, sweep: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """The fields of an experiment that are of its sweep: of what is drawn a list, each setting once."""
        fields = {"sweep_halving": self.halving, "sweep_keep": self.keep}
        if self.mode == "grid" or not sweep:
            return {"sweep": sweep, **fields}
        first = next(iter(sweep))
        for key, column in sweep.items():
            if len(column) != len(sweep[first]):
                raise InputError(
                    f"{self.origin}: sweep.{key} lists {len(column)} values and sweep.{first} {len(sweep[first])}; "
                    'sweep.mode = "list" takes the first of each together, then the second'
                )
        rows = list(zip(*sweep.values(), strict=True))
        unique = list({repr(row): row for row in rows}.values())
        if self.mode == "list" and len(unique) < len(rows):  # its seeds would be counted twice
            twice = next(row for i, row in enumerate(rows) if row in rows[:i])
            text = ", ".join(f"{key} = {value!r}" for key, value in zip(sweep, twice, strict=True))
            raise InputError(f"{self.origin}: sweep lists a setting twice, {text}")
        return {"sweep": dict(zip(sweep, zip(*unique, strict=True), strict=True)), "sweep_mode": "list", **fields}


def _is_axis(key: str) -> bool:
    """Whether a dotted key names what is swept."""
    return key.startswith("sweep.") and key[6:] not in SWEEP_OPTIONS


def _without_idle_options(entries: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Without the options of a sweep of which nothing is left to sweep."""
    return entries if any(map(_is_axis, entries)) else {k: entry for k, entry in entries.items() if not k.startswith("sweep.")}


def _with_sizes(model: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``[model]``, with the sizes of its pretrained weights.

    Raises:
      ValueError: no weights there, or a key that says otherwise than they do.
      RuntimeError: they cannot be fetched.
    """
    if not model.get("path"):
        return model
    from rljax.lm import fetch, weights

    try:
        sizes = weights.sizes(fetch.locate(model["path"]))
    except ValueError as error:
        raise ValueError(f"model.path: {error}") from error
    for key in model:
        if key in sizes and model[key] != sizes[key]:
            raise ValueError(f"model.{key} is {sizes[key]!r} in {model['path']}, so it cannot be {model[key]!r}; leave it out")
    return sizes | model


def _source(name: str, entries: dict[str, tuple[Any, str]], experiment: Experiment) -> Experiment | None:
    """An experiment that runs first, from the key ``name`` (a table, or where a config or a run is) and its dotted overrides.

    That of a config gets the seeds and the place of ``experiment``; a run that has those seeds stays what it is.
    """
    place, origin = entries.pop(name, (None, ""))
    if place is None or place == "none":
        if entries:
            key, (_, origin) = next(iter(entries.items()))
            raise InputError(f"{origin}: {key}: there is no {name} that it could change")
        return None
    if not isinstance(place, str | dict):
        raise InputError(f"{origin}: {name} must name a config or a run directory, got {place!r}")
    changes = {key.partition(".")[2]: entry for key, entry in entries.items()}
    if isinstance(place, dict):
        source = _resolve(_flatten(place, origin) | changes, "run")
        is_run = not set(experiment.seeds) - set(source.seeds)
    else:
        path = Path(place) if origin == "override" else Path(origin).parent / place
        try:
            source, is_run = load(path, {key: value for key, (value, _) in changes.items()}), path.is_dir()
        except InputError as error:
            raise InputError(f"{origin}: {name}: {error}") from error
    if not is_run:
        source = _beside(source, experiment)
    if source.sweep:
        raise InputError(
            f"{origin}: {name}: {source.name} sweeps {', '.join(source.sweep)}; lanes are told apart by their seeds alone"
        )
    if missing := set(experiment.seeds) - set(source.seeds):
        raise InputError(f"{origin}: {name}: {source.name} has no lane of seed {min(missing)}")
    return source


def _beside(source: Experiment, experiment: Experiment) -> Experiment:
    """``source``, and what it needs itself, on the seeds and in the place of ``experiment``."""
    own = {key: _beside(inner, experiment) for key in SOURCES if (inner := getattr(source, key)) is not None}
    return dataclasses.replace(source, seeds=experiment.seeds, out=experiment.out, **own)


def _places(names: tuple[str, ...], origin: str) -> tuple[str, ...]:
    """Data sets as absolute paths: those of a file are relative to it."""
    folder = Path() if origin == "override" else Path(origin).parent
    return tuple(name if name.startswith("minari:") else str((folder / name).absolute()) for name in names)


def digest(name: str) -> str:
    """Twelve hex digits of what a data set holds.

    Raises:
      InputError: no such file.
    """
    if name.startswith("minari:"):
        return name  # names of Minari have a version
    path = Path(name)
    if not path.is_file():
        raise InputError(f"data: there is no file {path}; `rljax record` makes one from a run")
    return file_digest(path)


def file_digest(path: Path) -> str:
    """Twelve hex digits of what a file holds; it is read once for as long as it does not change."""
    found = path.stat()
    return _digest(str(path), found.st_mtime_ns, found.st_size)


@functools.cache
def _digest(name: str, changed: int, size: int) -> str:
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12]


def _top_fields() -> dict[str, dataclasses.Field[Any]]:
    return {
        f.name: f
        for f in dataclasses.fields(Experiment)
        if f.name not in (*SECTIONS, *SOURCES) and not f.name.startswith("sweep_")
    }


def _convert(key: str, value: Any, hint: Any, origin: str) -> Any:
    try:
        return convert(key, value, hint)
    except ValueError as error:
        several = ""
        if isinstance(value, list) and origin == "override":
            several = "; several values are given apart, as in 0.1 0.2"
        elif isinstance(value, list) and key.startswith(("algo.", "model.")):
            several = f'; to sweep over several values write "{key}" = {value} under [sweep]'
        raise InputError(f"{origin}: {error}{several}") from error


def _env_value(key: str, value: Any, default: Any, origin: str) -> Any:
    is_wrapper = key.rpartition("env_params.")[2] in WRAPPERS  # swept or not
    if isinstance(value, dict) and is_number(default) and not is_wrapper:
        try:
            check_drawn(key, value)
        except ValueError as error:
            raise InputError(f"{origin}: {error}") from error
        return {end: float(number) for end, number in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        raise InputError(f"{origin}: {key} is read as a date, {value}; put it in quotes if it is text")
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InputError(f"{origin}: {key} must be true or false, got {value!r}")
        return value
    if isinstance(default, str) and not isinstance(value, str):
        raise InputError(f"{origin}: {key} must be text, got {value!r}")
    if not isinstance(default, int | float):
        return value
    if value == "none" and is_wrapper:
        return None  # takes back what a base file sets
    if not is_number(value):
        raise InputError(f"{origin}: {key} must be a number, got {value!r}")
    if isinstance(default, float):
        return float(value)
    return int(value) if value == int(value) else value


def _as_list(key: str, value: Any, origin: str, may_repeat: bool = False) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{origin}: {key} must be a list of values to sweep, got {value!r}")
    if not may_repeat and any(item in value[:i] for i, item in enumerate(value)):  # its seeds would be counted twice
        raise InputError(f"{origin}: {key} holds a value twice, {value!r}")
    return list(value)


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _as_python(value: Any) -> Any:
    """Without the numbers and arrays of numpy and jax."""
    if isinstance(value, dict):
        return {key: _as_python(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_as_python, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "none" if value is None else value
