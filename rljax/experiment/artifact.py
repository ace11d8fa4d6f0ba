"""What `rljax export` writes: a policy as a folder that jax alone can load, and the card of a model.

``greedy.jaxexport`` and ``sampled.jaxexport`` are `Agent.act` by ``jax.export``, for batches of any size on CPU, CUDA and TPU;
``parameters.npz`` is what they take of the train state, ``policy.json`` their inputs, ``policy.py`` the loader. Parameters are no
constants of the programs: the two share them, XLA folds none of them (so that actions are those of the run to the bit), and
whoever has numpy can read them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax import exported
from rljax.agents import Agent
from rljax.envs import Box, Environment, Space, TimeStep
from rljax.experiment import report
from rljax.experiment.config import Experiment, InputError
from rljax.lm import fetch

PLATFORMS = ("cpu", "cuda", "tpu")
INPUTS = {  # where each goes in a time step; all else of one is zero
    "observation": "observation",
    "action_mask": "mask",
    "reward": "reward",
    "terminated": "first",
}
WARM_UP, DECISIONS = 200, 2_000  # not timed, and timed


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``target``, or what that links to, when it is complete.

    Raises:
      InputError: there is something already, or it cannot be written.
    """
    place = Path(os.path.realpath(target))
    leads = f", which leads to {place}," if target.is_symlink() else ""
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise InputError(f"{target}{leads} exists already, and nothing is written over: name another directory")
    if place.is_symlink():
        raise InputError(f"{target} is a link that leads to itself: name another directory")
    folder = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True)
        try:
            yield folder
            os.replace(folder, place)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error


def write_policy(folder: Path, agent: Agent, state: Any, env: Environment, about: dict[str, Any]) -> None:
    """Writes everything but the card.

    Args:
      agent: acts without ``data``.
      state: its train state.
      env: whose observations it acts on.
      about: goes into ``policy.json`` as it is.

    Raises:
      ValueError: observations that are no single array, or an agent that acts on more than `INPUTS`, begins with a carry that
        depends on what it sees, or cannot be traced for a batch of unknown size.
    """
    batch_of_one = jax.eval_shape(lambda: jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1))[1])
    if not hasattr(batch_of_one.observation, "shape"):
        raise ValueError("its observations are no single array")
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch_of_one)
    start = jax.jit(agent.start)(state, blank)
    rows, carry_type = jax.tree.flatten(jax.device_get(start))
    state_leaves, state_type = jax.tree.flatten(state)
    names = _names(state)

    def decide(greedy: bool, leaves: Any, timestep: TimeStep, carry: Any, bits: Array) -> tuple[Array, list[Array]]:
        key = jax.random.wrap_key_data(bits, impl="threefry2x32")
        state = jax.tree.unflatten(state_type, leaves)
        carry, action = agent.act(state, jax.tree.unflatten(carry_type, carry), timestep, key, greedy)
        return action, jax.tree.leaves(carry)

    bits = jax.ShapeDtypeStruct((2,), jnp.uint32)
    used: set[str] = set()
    for greedy in exported.PROGRAMS:
        of_all = {"state": state_leaves, "timestep": blank, "carry": rows, "bits": bits}
        used |= _used(lambda x, greedy=greedy: decide(greedy, x["state"], x["timestep"], x["carry"], x["bits"]), of_all)
    seen = {"observation", *(name.partition("/")[2] for name in used if name.startswith("timestep/"))}
    if "terminated" in seen:  # together they say that an episode begins
        seen.discard("truncated")
    if beyond := sorted(seen - INPUTS.keys()):
        raise ValueError(f"it acts on {beyond[0]} of a time step, and an exported policy on {', '.join(INPUTS)} alone")
    begins = _used(lambda x: agent.start(x["state"], x["timestep"]), {"state": state, "timestep": blank})
    if any(name.startswith("timestep/") for name in begins):
        raise ValueError("what it remembers at first depends on what it sees")
    kept = {name: i for i, name in enumerate(names) if f"state/{i}" in used}
    parameters = {name: np.asarray(state_leaves[i]) for name, i in kept.items()}
    inputs = {at: getattr(blank, name) for name, at in INPUTS.items() if name in seen}

    def program(greedy: bool) -> Callable[..., Any]:
        def act(parameters: Any, inputs: Any, carry: Any, bits: Array) -> tuple[Array, list[Array]]:
            batch = inputs["observation"].shape[0]
            timestep = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), blank)
            timestep = timestep.replace(**{name: inputs[INPUTS[name]] for name in seen})
            leaves = [parameters.get(name, leaf) for name, leaf in zip(names, state_leaves, strict=True)]
            return decide(greedy, leaves, timestep, carry, bits)

        return act

    (batch,) = jax.export.symbolic_shape("batch")
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), (inputs, rows))
    arguments = (parameters, *many, bits)
    arrays = {**parameters, **{f"carry/{i}": row for i, row in enumerate(rows)}}
    np.savez(folder / exported.PARAMETERS, **arrays)  # pyright: ignore[reportArgumentType]
    action = None
    for greedy, name in exported.PROGRAMS.items():
        try:
            lowered = jax.export.export(jax.jit(program(greedy)), platforms=PLATFORMS)(*arguments)
        except jax.errors.InconclusiveDimensionOperation as error:
            raise ValueError(f"it acts by the size of the batch: {str(error).partition(chr(10))[0]}") from error
        (folder / name).write_bytes(lowered.serialize())
        action = lowered.out_avals[0]
    files = (exported.PARAMETERS, *exported.PROGRAMS.values())
    about = {
        "format": exported.FORMAT,
        **about,
        "inputs": {name: _row(x) for name, x in inputs.items()},
        "carry": [_row(row) for row in rows],
        "action": _row(action),
        "observation_space": _space(env.observation_space),
        "action_space": _space(env.action_space),
        "parameters": {name: str(x.dtype) for name, x in arrays.items()},
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
        "jax": jax.__version__,
        "platforms": PLATFORMS,
    }
    _write_json(folder, about)
    shutil.copyfile(exported.__file__, folder / "policy.py")


def _write_json(folder: Path, about: dict[str, Any]) -> None:
    (folder / "policy.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _used(function: Callable[[Any], Any], argument: Any) -> set[str]:
    """Names of the leaves of its argument on which a function depends."""
    names = _names(argument)
    return {names[i] for i in jax.export.export(jax.jit(function))(argument).module_kept_var_idx}


def _row(x: Any) -> dict[str, Any]:
    """Shape without the batch, and dtype."""
    return {"shape": list(x.shape[1:]), "dtype": str(x.dtype)}


def _space(space: Space) -> dict[str, Any]:
    """Its kind and fields; bounds that are the same everywhere as one number, infinite ones as null."""
    fields: dict[str, Any] = {"kind": type(space).__name__}
    if not isinstance(space, Box):
        return fields | dataclasses.asdict(space)
    for name in ("low", "high"):
        bound = np.asarray(getattr(space, name), np.float64)
        bound = bound.reshape(-1)[0, ...] if (bound == bound.flat[0]).all() else bound
        shown = bound.astype(object)
        shown[~np.isfinite(bound)] = None
        fields[name] = shown.tolist()
    return fields | {"shape": list(space.shape), "dtype": str(jnp.dtype(space.dtype))}


def time_policy(folder: Path) -> None:
    """Adds ``latency`` to ``policy.json``: median and 99th percentile, in microseconds, of greedy decisions on one observation on
    the CPU, one after the other, from numpy arrays to a numpy array and with all that the loader checks."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        policy = exported.load(folder)
        timed = _timed(policy)
    _write_json(folder, {**policy.about, "latency": timed})


def _timed(policy: exported.Policy) -> dict[str, Any]:
    rows: dict[str, Any] = {name: np.zeros((1, *spec["shape"]), spec["dtype"]) for name, spec in policy.about["inputs"].items()}
    if "mask" in rows:
        rows["mask"][:] = True
    seconds = []
    for _ in range(WARM_UP + DECISIONS):
        began = time.perf_counter()
        action, _ = policy(**rows)
        np.asarray(action)
        seconds.append(time.perf_counter() - began)
    median, slow = np.percentile(np.asarray(seconds[WARM_UP:]) * 1e6, (50, 99))
    return {"median_us": round(median, 1), "p99_us": round(slow, 1), "decisions": DECISIONS, "machine": _machine()}


def _machine() -> str:
    """The name of the processor, as far as the system says it, and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def latency_text(about: dict[str, Any]) -> str:
    """What ``policy.json`` says of it, in words."""
    of = about["latency"]
    return f"{of['median_us']:g} us a decision (median; 99th percentile {of['p99_us']:g} us), one observation, {of['machine']}"


def policy_card(run: report.Run, lane: int, after: str, about: dict[str, Any]) -> str:
    """The card of a policy; ``about`` is its ``policy.json``."""
    env, agent, inputs = about["env"], about["agent"], about["inputs"]
    mask = ", mask=mask" if "mask" in inputs else ""
    later = mask + (", reward=reward" if "reward" in inputs else "")
    arrays = {**inputs, "action": about["action"]}
    shapes = [
        f"- `{name}`: {spec['dtype']} `[{', '.join(map(str, ('batch', *spec['shape'])))}]`" for name, spec in arrays.items()
    ]
    if about["carry"]:
        shapes.append("- `carry`: what the call before returned, for the policy has a memory; none where all episodes begin")
    use = [
        "The folder needs `jax` and `flatbuffers`, and nothing of rljax; `policy.py` is the loader.",
        "",
        "```python",
        "import jax",
        "",
        "from policy import load",
        "",
        'policy = load(".")',
        f"action, carry = policy(observation{mask})  # greedy; the first of an episode",
        f"action, carry = policy(observation, carry{later})",
        f"action, carry = policy(observation, carry{later}, key=jax.random.key(0), greedy=False)  # drawn as in training",
        "```",
        "",
        *shapes,
        "",
        "Batches are of any size, and each new one is compiled once. The programs are for",
        f"{', '.join(about['platforms'])}, by jax {about['jax']}; a later jax reads them for six months at least.",
        "",
        f"{latency_text(about)}: greedy, {about['latency']['decisions']:,} in",
        "a row through this loader, from numpy to numpy, as busy as the machine was.",
    ]
    tags = {
        "library_name": "rljax",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "jax", agent, env],
    }
    return _card(run, lane, f"A policy for `{env}`, trained with {agent} in rljax, {after}.", tags, use)


def language_model_card(run: report.Run, lane: int, after: str, experiment: Experiment) -> str:
    """The card of a language model."""
    info, model, source = run.info, experiment.algo.model, experiment.start_from
    tags: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    tags["tags"] = ["rljax", "reinforcement-learning", info["agent"]]
    base = f"the weights of `{model.path}`" if model.path else "weights drawn at random"
    if model.path in fetch.MODELS:
        tags["base_model"] = fetch.MODELS[model.path].name
        base = f"the weights of `{tags['base_model']}`"
    if model.lora_rank:
        base += f", by adapters of rank {model.lora_rank} that are merged here"
    if source is not None:
        base += f"; it went on from the run `{source.name}/{source.hash}`"
    text = f"A language model, trained with {info['agent']} on `{info['env']}` in rljax, {after}. Its training began with {base}."
    use = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'model = AutoModelForCausalLM.from_pretrained(".")',
        "```",
        "",
        "Prompts are those of the environment; evaluations were greedy.",
    ]
    return _card(run, lane, text, tags, use)


def _card(run: report.Run, lane: int, text: str, tags: dict[str, Any], use: list[str]) -> str:
    """A card in Markdown, with ``tags`` as the front matter that Hugging Face reads."""
    info, summary = run.info, report.summarize(run)
    setting = next(of for of in summary["settings"] if lane in [seed["lane"] for seed in (*of["seeds"], *of["failed"])])
    own = next((seed for seed in setting["seeds"] if seed["lane"] == lane), None)
    score = "not known" if own is None else f"{own['return']:,.2f}"
    if own is not None and own.get("episodes"):
        score += f", the mean of {own['episodes']:,} evaluation episodes"
    label, seeds, centre, interval, mean, span = report.result_rows([setting])[0]
    others = f"all seeds of {label}" if setting["values"] else "all seeds"
    spread = "" if setting["spread"] == "established" else f" ({setting['spread']})"
    results = {
        "this policy": score,
        others: f"IQM {centre}, 95% bootstrap interval {interval}; seeds: {seeds}",
        "their mean, and their range": f"{mean}; {span}",
        "random policy": report.random_line(summary["random"], [setting]),
    }
    provenance = {
        "run": f"`{info['name']}/{info['config_hash']}`, {info['status']}; lane {lane}, seed {info['lanes'][lane]['seed']}",
        "config hash": f"`{info['config_hash']}`",
        "commit": f"`{info.get('commit')}`{', with uncommitted changes' if info.get('dirty') else ''}",
        "versions": ", ".join(f"{name} {version}" for name, version in info["versions"].items()),
        "trained on": f"{info['platform']}, {len(info['devices'])} device{'s' * (len(info['devices']) > 1)}",
        "to train it again": f"`{info['command']}`, or `rljax run config.toml` with the config below",
    }
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in tags.items()),  # a JSON text is YAML too
        "---",
        *("", f"# {info['agent']} on {info['env']}", "", text),
        *("", "## Use", "", *use),
        *("", "## Results", "", f"| `{summary['metric']}` | |", "|---|---|"),
        *(f"| {name} | {value} |" for name, value in results.items()),
        *("", f"The policy is one seed; what its algorithm reaches is said by all of them{spread}."),
        *("", "## Provenance", "", *(f"- {name}: {value}" for name, value in provenance.items())),
        *("", "## Config", "", "```toml", run.config.strip(), "```"),
        *("", "## Citation", "", "```bibtex", report.citation(info), "```"),
    ]
    return "\n".join(lines) + "\n"
