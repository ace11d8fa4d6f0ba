"""When run-time RL earns its keep: four bandits and four fixed rules send requests to tools whose quality stays, or drifts.

    python experiments/routing/run.py --tune   # prints what settings cost on the tuning seeds, 0 to 4
    python experiments/routing/run.py          # runs what has not been run, keeps what was measured, writes the page
    python experiments/routing/run.py --page   # writes the page again from what was kept

The cumulative regret of each seed is kept in benchmarks/results/routing.json; docs/routing.md and its figure are made of that.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rljax.envs.bandits import Routing
from rljax.experiment import load, run, train
from rljax.experiment.report import REGRET, read_run
from rljax.experiment.statistics import bootstrap_interval, iqm

sys.path.insert(0, str(Path(__file__).parents[1]))
from labs import main, say, spread

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "routing.json"
PAGE, FIGURE = ROOT / "docs" / "routing.md", ROOT / "docs" / "routing.png"
METHODS = {
    "linucb": "LinUCB",
    "thompson": "Thompson sampling",
    "epsilon_greedy": "epsilon-greedy",
    "neural_linear": "neural-linear",
}
RULES = {
    "random": "a tool at random",
    "single": "the best single tool of the start",
    "difficulty": "the best tool of the start for the difficulty",
    "start": "the best tool of the start for difficulty and topic",
}
TUNING: dict[str, dict[str, Any]] = {
    "linucb": {"sweep.algo.alpha": [0.1, 0.3, 1.0]},
    "thompson": {"sweep.algo.noise_variance": [0.02, 0.05, 0.2]},
    "epsilon_greedy": {"sweep.algo.epsilon": [0.01, 0.03, 0.1]},
    "neural_linear": {"sweep.algo.noise_variance": [0.02, 0.05], "sweep.algo.learning_rate": [1e-3, 3e-3]},
}


def tune() -> None:
    """Mean regret on the tuning seeds of every setting."""
    for name, sweep in TUNING.items():
        changes = {"seeds": [0, 1, 2, 3, 4], "evals": 1, "eval_episodes": 2, "sweep.algo.discount": [1.0, 0.998, 0.995], **sweep}
        experiment = load(HERE / f"{name}.toml", changes)
        totals = np.asarray(train(experiment)[1]["regret"]).mean(1) * experiment.total_steps
        found: dict[str, list[float]] = {}
        for lane, total in zip(experiment.lanes(), totals, strict=True):
            found.setdefault(", ".join(f"{key} {lane[key]:g}" for key in experiment.sweep), []).append(total)
        for setting, regret in found.items():
            print(f"{name}: {setting}: {np.mean(regret):.0f}", flush=True)


def tables(env: Routing, size: int = 64) -> dict[str, jax.Array]:
    """What each rule does, ``[difficulty, topic]``: made of what the tools are worth before any drift."""
    difficulty = (jnp.arange(size) + 0.5) / size
    of_all = jax.vmap(jax.vmap(env.expected, (None, 0)), (0, None))(difficulty, jnp.arange(env.topics))  # [size, topics, tools]
    whole = jnp.ones((size, env.topics), jnp.int32)
    return {
        "single": whole * of_all.mean((0, 1)).argmax(),
        "difficulty": whole * of_all.mean(1).argmax(-1)[:, None],
        "start": of_all.argmax(-1),
    }


def follow(rule: str, drift: float, seeds: tuple[int, ...], points: list[int]) -> np.ndarray:
    """Cumulative regret of a rule after so many requests, ``[seeds, points]``."""
    env = dataclasses.replace(Routing(), drift=drift)
    table = tables(env).get(rule)

    def life(seed: jax.Array) -> jax.Array:
        reset_key, key = jax.random.split(jax.random.key(seed))

        def step(state: Any, key: jax.Array) -> Any:
            act_key, env_key = jax.random.split(key)
            _, difficulty, topic, _ = state
            action = env.action_space.sample(act_key)
            if table is not None:
                action = table[jnp.minimum((difficulty * len(table)).astype(jnp.int32), len(table) - 1), topic]
            state, timestep = env.step(env_key, state, action)
            return state, timestep.info["regret"]

        regret = jax.lax.scan(step, env.reset(reset_key)[0], jax.random.split(key, points[-1]))[1]
        return jnp.cumsum(regret)[jnp.asarray(points) - 1]

    return np.asarray(jax.jit(jax.vmap(life))(jnp.asarray(seeds)))


def measure() -> dict[str, Any]:
    """Cumulative regret of each lane at every row, and of the rules on as many lives at the same places."""
    kept: dict[str, Any] = {"lanes": [], "configs": {}}
    for name in METHODS:
        experiment = load(HERE / f"{name}.toml")
        finished = run(experiment, listener=say)
        record = read_run(finished.path)
        kept["configs"][name] = experiment.hash
        kept |= {key: record.info[key] for key in ("versions", "platform", "finished")}
        for lane in finished.lanes:
            rows = [row for row in record.rows if row["lane"] == lane["lane"] and row.get(REGRET) is not None]
            kept["steps"] = [row["step"] for row in rows]
            kept["lanes"].append(
                {
                    "method": name,
                    "seed": lane["seed"],
                    "drift": lane["env_params.drift"],
                    "discount": lane["algo.discount"],
                    "regret": [round(row[REGRET], 1) for row in rows],
                }
            )
    experiment = load(HERE / "linucb.toml")
    for rule in RULES:
        for drift in experiment.sweep["env_params.drift"]:
            for seed, regret in zip(experiment.seeds, follow(rule, drift, experiment.seeds, kept["steps"]), strict=True):
                own = {"method": rule, "seed": seed, "drift": drift, "discount": None}
                kept["lanes"].append({**own, "regret": [round(float(x), 1) for x in regret]})
    return kept


def settings(kept: dict[str, Any]) -> dict[tuple[str, float | None], dict[float, np.ndarray]]:
    """``{(method, discount): {drift: [seeds, points]}}``, rules first."""
    found: dict[tuple[str, float | None], dict[float, list[Any]]] = {}
    for lane in sorted(kept["lanes"], key=lambda lane: lane["method"] not in RULES):
        found.setdefault((lane["method"], lane["discount"]), {}).setdefault(lane["drift"], []).append(lane["regret"])
    return {key: {drift: np.asarray(rows) for drift, rows in of.items()} for key, of in found.items()}


def label(method: str, discount: float | None) -> str:
    if discount is None:
        return RULES[method]
    return METHODS[method] + (f", discount {discount:g}" if discount < 1 else "")


def page(kept: dict[str, Any]) -> str:
    found = settings(kept)
    drifts = sorted({lane["drift"] for lane in kept["lanes"]})
    seeds = sorted({lane["seed"] for lane in kept["lanes"]})
    lines = [
        f"Seeds {seeds[0]} to {seeds[-1]}; cumulative regret after {kept['steps'][-1]:,} requests, IQM over seeds [95% bootstrap "
        f"interval], less is better; measured {kept['finished'][:10]}, jax {kept['versions']['jax']}.",
        "",
        "| | " + " | ".join(f"drift {drift:g}" if drift else "no drift" for drift in drifts) + " |",
        "|---" * (len(drifts) + 1) + "|",
    ]
    for (method, discount), of in found.items():
        lines.append(f"| {label(method, discount)} | " + " | ".join(spread(of[d][:, -1].tolist(), 0) for d in drifts) + " |")
    return "\n".join(lines) + "\n"


def draw(kept: dict[str, Any]) -> None:
    found = settings(kept)
    drifts = sorted({lane["drift"] for lane in kept["lanes"]})
    shown = [key for key in found if key[0] != "random"]
    steps = np.asarray(kept["steps"])
    figure, axes = plt.subplots(1, len(drifts), figsize=(11.0, 4.6), layout="constrained", sharey=True)
    for axis, drift in zip(axes, drifts, strict=True):
        for method, discount in shown:
            rows = found[method, discount][drift]
            middle = np.array([iqm(column) for column in rows.T])
            low, high = np.array([bootstrap_interval(column, resamples=1000) for column in rows.T]).T
            is_rule = method in RULES
            color = f"{0.25 * list(RULES).index(method) - 0.25}" if is_rule else f"C{list(METHODS).index(method)}"
            style = ":" if is_rule else "--" if discount == 1.0 else "-"
            axis.plot(steps, middle, style, color=color, label=label(method, discount), lw=1.6)
            axis.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
        axis.set_title(f"drift {drift:g}" if drift else "no drift", loc="left", fontsize=10)
        axis.set_xlabel("requests")
        axis.set_xlim(0, steps[-1])
        axis.set_xticks(np.arange(0, steps[-1], 2500))
        axis.set_ylim(0, 1000)
        axis.grid(color="0.93")
    axes[0].set_ylabel("cumulative regret")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=80)


if __name__ == "__main__":
    main(__doc__, RESULTS, PAGE, measure, draw, page, tune)
