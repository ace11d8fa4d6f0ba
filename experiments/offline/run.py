"""Cloning or offline RL: which learns more from the same recorded steps, and what values are worth without a penalty.

    python experiments/offline/run.py          # runs what has not been run, keeps what was measured, writes the page
    python experiments/offline/run.py --page   # writes the page again from what was kept

Fifteen thousand steps each of an expert, of a policy half as good, of random actions, and of the three together, on two tasks.
What each seed reaches is kept in benchmarks/results/offline.json; docs/cloning.md and its figure are made of that.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rljax import make_env
from rljax.agents.offline import view
from rljax.agents.sac import actions_of
from rljax.experiment import Experiment, Recording, Result, load, read, record, run, together, write
from rljax.experiment.report import read_run
from rljax.experiment.statistics import bootstrap_interval, iqm, normalized_score

sys.path.insert(0, str(Path(__file__).parents[1]))
from labs import main, say, spread

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DATA = ROOT / "runs" / "offline_data"
RESULTS = ROOT / "benchmarks" / "results" / "offline.json"
PAGE = ROOT / "docs" / "cloning.md"
FIGURE = ROOT / "docs" / "cloning.png"
STEPS = 15_000  # of a data set; whole episodes of Pendulum, where one that is cut would have the best return
TASKS = {"cartpole": ("CartPole-v1", 8_000, 200_000), "pendulum": ("Pendulum-v1", 25_000, 200_000)}  # medium and expert PPO
SETS = ("expert", "mixed", "medium", "random")
METHODS = {
    "BC": ("bc", {}),
    "BC, best 10%": ("bc", {"algo.best": 0.1}),
    "Decision Transformer": ("decision_transformer", {}),
    "IQL": ("iql", {}),
    "CQL": ("cql", {}),
    "TD3+BC": ("td3_bc", {}),
}
DISCOUNT = {"cartpole": 0.99, "pendulum": 0.95}
PENALTIES = (0.0, 1.0, 5.0)


def keep(recording: Recording, path: Path) -> None:
    path.unlink(missing_ok=True)  # the same again
    write(recording, path)


def make_data(task: str) -> dict[str, Path]:
    """Records the data sets of a task, equally from each of five lanes."""
    _, medium, expert = TASKS[task]
    runs = {}
    for level, steps in (("medium", medium), ("expert", expert)):
        runs[level] = run(load(HERE / f"{task}.toml", {"total_steps": steps, "name": f"{task}_{level}"}), listener=say).path
    files = {name: DATA / f"{task}_{name}.npz" for name in SETS}
    for seed, level in enumerate(("expert", "medium", "random")):
        for name, steps in ((level, STEPS), (f"part_{level}", STEPS // 3)):
            source, epsilon = (runs["expert"], 1.0) if level == "random" else (runs[level], 0.0)
            options: Any = {"epsilon": epsilon, "expert": runs["expert"], "num_envs": 1}
            parts = [record(source, steps // 5, lane=lane, seed=10 * seed + lane, **options) for lane in range(5)]
            keep(together(parts, [f"lane {lane}" for lane in range(5)]), DATA / f"{task}_{name}.npz")
    parts = [DATA / f"{task}_part_{level}.npz" for level in ("random", "medium", "expert")]
    keep(together([read(p) for p in parts], [p.name for p in parts]), files["mixed"])
    return files


def cell(task: str, method: str, file: Path, **changes: Any) -> Experiment:
    """One method on one data set, five seeds."""
    algo, own = METHODS[method]
    name = f"{task}_{file.stem.removeprefix(task + '_')}_{algo}" + ("_best" if own else "")
    set_here = {"env": TASKS[task][0], "data": [str(file.resolve())], "name": name, **own}
    if algo in ("iql", "cql", "td3_bc"):
        set_here["algo.discount"] = DISCOUNT[task]
    if algo == "cql" and task == "pendulum":
        set_here["algo.num_actions"] = 4  # of each kind, for the integral; ten take an hour of CPU more
    return load(HERE / f"{algo}.toml", {**set_here, **changes})


def values_of(task: str, finished: Result, lane: int, episodes: int = 256) -> tuple[float, float]:
    """What a CQL critic says of the first steps of episodes, and what they earn, discounted: ``(Q(s, a), return)``."""
    agent, state = finished.policy(lane)
    env, discount = make_env(TASKS[task][0]), DISCOUNT[task]
    actions = actions_of(finished.experiment.algo, env)

    @jax.jit
    def play(state: Any) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(1), episodes)
        env_state, timestep = jax.vmap(env.reset)(keys)
        first = agent.act(state, None, timestep, keys[0], True)[1]
        q = actions.taken(state.params["critics"], view(state.observation_stats, timestep.observation), first).min(0)

        def step(loop: Any, t: jax.Array) -> Any:
            env_state, timestep, alive, total = loop
            action = agent.act(state, None, timestep, keys[0], True)[1]
            step_keys = jax.vmap(functools.partial(jax.random.fold_in, data=t))(keys)
            env_state, timestep = jax.vmap(env.step)(step_keys, env_state, action)
            total = total + jnp.where(alive, discount**t * timestep.reward, 0.0)
            return (env_state, timestep, alive & ~timestep.done, total), None

        loop = (env_state, timestep, jnp.ones(episodes, bool), jnp.zeros(episodes))
        return q.mean(), jax.lax.scan(step, loop, jnp.arange(500))[0][3].mean()

    q, earned = play(state)
    return float(q), float(earned)


def measure() -> dict[str, Any]:
    """Final greedy returns of each method, data set and seed, and the values of CQL's critics at growing penalties."""
    kept: dict[str, Any] = {"lanes": [], "values": [], "sets": [], "configs": {}}
    for task in TASKS:
        for name, file in make_data(task).items():
            recording = read(file)
            about = {key: recording.about[key] for key in ("random_return", "expert_return")}
            mean = float(recording.returns.mean())
            kept["sets"].append({"task": task, "set": name, "steps": recording.size, "return": round(mean, 2), **about})
            for method in METHODS:
                if method == "TD3+BC" and task == "cartpole":
                    continue
                finished = run(cell(task, method, file), listener=say)
                info = read_run(finished.path).info
                kept |= {key: info[key] for key in ("versions", "platform", "finished")}
                kept["configs"][finished.experiment.name] = finished.experiment.hash
                for lane, end in zip(finished.lanes, finished.eval_returns[:, -1], strict=True):
                    score = round(float(normalized_score(end, about, name)), 2)
                    kept["lanes"].append({"task": task, "set": name, "method": method, "seed": lane["seed"], "score": score})
            if task != "cartpole" or name not in ("expert", "mixed"):  # values of Pendulum take an hour of CPU
                continue
            sweep = {"sweep.algo.conservative_coef": list(PENALTIES), "name": f"{task}_{name}_penalty"}
            finished = run(cell(task, "CQL", file, **sweep), listener=say)
            for i, lane in enumerate(finished.lanes):
                q, earned = values_of(task, finished, i)
                row = {"task": task, "set": name, "penalty": lane["algo.conservative_coef"], "seed": lane["seed"]}
                kept["values"].append({**row, "q": round(q, 3), "earned": round(earned, 3)})
    return kept


def scores(kept: dict[str, Any], task: str, name: str, method: str) -> list[float]:
    where = {"task": task, "set": name, "method": method}
    return [lane["score"] for lane in kept["lanes"] if where.items() <= lane.items()]


def verdict(kept: dict[str, Any], task: str, name: str) -> str:
    """Whether the best offline RL ends above the best cloning, by their intervals over seeds."""
    cloning, rl = (
        max((m for m in names if scores(kept, task, name, m)), key=lambda m: iqm(scores(kept, task, name, m)))
        for names in (("BC", "BC, best 10%"), ("IQL", "CQL", "TD3+BC"))
    )
    of_cloning, of_rl = (bootstrap_interval(scores(kept, task, name, m)) for m in (cloning, rl))
    if of_rl[0] > of_cloning[1]:
        return f"{rl} above {cloning}"
    if of_cloning[0] > of_rl[1]:
        return f"{cloning} above {rl}"
    return f"{rl} and {cloning} cannot be told apart"


def page(kept: dict[str, Any]) -> str:
    seeds = sorted({lane["seed"] for lane in kept["lanes"]})
    lines = [
        f"Seeds {seeds[0]} to {seeds[-1]}; normalised score of the greedy policy at the end, 0 the random policy "
        f"and 100 the expert, IQM over seeds [95% bootstrap interval]; measured {kept['finished'][:10]}, jax "
        f"{kept['versions']['jax']}. The seeds are of the training; the data are the same for all."
    ]
    for task, (env, _, _) in TASKS.items():
        own = {s["set"]: s for s in kept["sets"] if s["task"] == task}
        lines += ["", f"**{env}** (random {own['expert']['random_return']:.0f}, expert {own['expert']['expert_return']:.0f})", ""]
        lines.append("| | " + " | ".join(f"{name}, {own[name]['return']:.0f} an episode" for name in SETS) + " |")
        lines.append("|---" * (len(SETS) + 1) + "|")
        for method in METHODS:
            cells = [scores(kept, task, name, method) for name in SETS]
            if cells[0]:
                lines.append(f"| {method} | " + " | ".join(spread(values, 0) for values in cells) + " |")
        lines.append("| *best RL against best cloning* | " + " | ".join(verdict(kept, task, name) for name in SETS) + " |")
    lines += [
        "",
        "**What CQL's critic says of first steps, and what they earn** (discounted; IQM over seeds)",
        "",
    ]
    lines += ["| task and data | penalty | Q says | is earned |", "|---|---|---|---|"]
    for name in ("expert", "mixed"):
        for penalty in PENALTIES:
            rows = [row for row in kept["values"] if {"set": name, "penalty": penalty}.items() <= row.items()]
            q, earned = (spread([row[key] for row in rows], 1) for key in ("q", "earned"))
            lines.append(f"| CartPole-v1, {name} | {penalty:g} | {q} | {earned} |")
    return "\n".join(lines) + "\n"


def draw(kept: dict[str, Any]) -> None:
    figure, axes = plt.subplots(2, 1, figsize=(10.0, 6.0), layout="constrained", sharex=True)
    for axis, (task, (env, _, _)) in zip(axes, TASKS.items(), strict=True):
        for i, method in enumerate(METHODS):
            ends = [scores(kept, task, name, method) for name in SETS]
            if not ends[0]:
                continue
            x = np.arange(len(SETS)) + 0.12 * (i - 2.5)
            middle = np.array([iqm(end) for end in ends])
            bounds = np.array([bootstrap_interval(end) for end in ends]).T
            marker = "s" if i < 3 else "o"
            axis.errorbar(x, middle, np.abs(bounds - middle), label=method, color=f"C{i}", marker=marker, ls="", capsize=2)
            for place, end in zip(x, ends, strict=True):
                axis.plot([place] * len(end), end, ".", color=f"C{i}", alpha=0.4, ms=4)
        means = {s["set"]: float(normalized_score(s["return"], s, s["set"])) for s in kept["sets"] if s["task"] == task}
        for i, name in enumerate(SETS):
            axis.hlines(means[name], i - 0.42, i + 0.42, color="0.6", lw=1, ls="--", label="the data" if i == 0 else None)
        axis.set_title(env, loc="left", fontsize=10)
        axis.set_ylabel("normalised score")
        axis.set_xticks(range(len(SETS)), SETS)
        axis.grid(axis="y", color="0.92")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=80)


if __name__ == "__main__":
    main(__doc__, RESULTS, PAGE, measure, draw, page)
