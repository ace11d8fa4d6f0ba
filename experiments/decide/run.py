"""Which method for how many labels: SFT, DPO, best-of-n, GRPO and PPO from one start, on one task.

    python experiments/decide/run.py --tune    # prints what learning rates and lengths reach on the tuning seeds, 0 to 4
    python experiments/decide/run.py           # runs what has not been run, keeps what was measured, writes the page
    python experiments/decide/run.py --page    # writes the page again from what was kept

A label is one demonstration, or one answer that was judged right or wrong. Every method is given the same number of them, so that
methods that learn from samples have drawn as many. What each seed reaches is kept in benchmarks/results/decide.json;
docs/decide.md and its figure are made of that.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import rljax
from rljax.agents.preferences import collect_samples, log_probs
from rljax.experiment import Experiment, evaluate, load, load_states, run, sample_answers
from rljax.experiment.report import read_run
from rljax.experiment.statistics import best_of_n, bootstrap_interval, iqm
from rljax.networks import transformer

sys.path.insert(0, str(Path(__file__).parents[1]))
from labs import main, say, spread

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decide.json"
PAGE, FIGURE = ROOT / "docs" / "decide.md", ROOT / "docs" / "decide.png"
LABELS = (256, 2048, 16384)
N = 16  # of best-of-n
PROMPTS = 128
TUNING_SEEDS = (0, 1, 2, 3, 4)
LONGER = {"env_params.digits": 3}
OTHER = {"env_params.share": 0.0}
METHODS = {
    "sft": "SFT, demonstrations",
    "sft_right": "SFT, as many demonstrations as answers were right",
    "filtered": "SFT, own right answers",
    "dpo": "DPO, own answers",
    "best_of": f"best of {N} by a reward model",
    "grpo": "GRPO",
    "ppo": "PPO",
}
# Learning rate and gradient steps, chosen by --tune. GRPO and PPO take as many steps as the labels allow: theirs are not read.
SETTINGS: dict[tuple[str, int], tuple[float, int]] = {
    ("sft", 256): (1e-3, 120),
    ("sft", 2048): (1e-3, 240),
    ("sft", 16384): (1e-3, 400),
    ("filtered", 256): (3e-4, 60),
    ("filtered", 2048): (1e-3, 300),
    ("filtered", 16384): (1e-3, 900),
    ("dpo", 256): (1e-4, 60),
    ("dpo", 2048): (1e-4, 180),
    ("dpo", 16384): (1e-3, 800),
    ("reward_model", 256): (3e-4, 150),
    ("reward_model", 2048): (1e-3, 360),
    ("reward_model", 16384): (3e-4, 1000),
    ("grpo", 256): (4e-4, 0),
    ("grpo", 2048): (4e-4, 0),
    ("grpo", 16384): (2e-4, 0),
    ("ppo", 256): (4e-4, 0),
    ("ppo", 2048): (2e-4, 0),
    ("ppo", 16384): (2e-4, 0),
}


def experiment(
    method: str, labels: int, rate: float | tuple[float, ...], updates: int, seeds: tuple[int, ...] | None = None, evals: int = 1
) -> Experiment:
    """One cell: ``method`` with so many labels and gradient steps, at one learning rate or each of several."""
    file = HERE / f"{'sft' if method == 'sft_right' else method}.toml"
    changes: dict[str, Any] = {"name": f"{method}_{labels}", "evals": evals}
    if seeds:
        changes["seeds"] = seeds
    if method == "best_of":
        return dataclasses.replace(load(file, changes), reward_from=experiment("reward_model", labels, rate, updates, seeds))
    base = load(file)
    env = rljax.make_env(base.env, **base.env_params)
    space: Any = env.observation_space
    if method in ("grpo", "ppo"):
        changes["total_steps"] = labels * (space.length - space.prompt)
    else:
        changes["total_steps"] = updates * rljax.make_agent(base.algo, env).env_steps
        of_pairs = method in ("dpo", "reward_model")
        changes["algo.num_pairs" if of_pairs else "algo.num_examples"] = labels // base.algo.answers if of_pairs else labels
    changes["sweep.algo.learning_rate" if isinstance(rate, tuple) else "algo.learning_rate"] = rate
    return load(file, changes)


def tune() -> None:
    """Accuracy on the tuning seeds, of every learning rate after every tenth of the longest training."""
    rates = {"grpo": (1e-4, 2e-4, 4e-4), "ppo": (1e-4, 2e-4, 4e-4), "reward_model": (3e-4, 1e-3)}
    longest = {256: 300, 2048: 600, 16384: 1000}
    for method in ("sft", "filtered", "dpo", "reward_model", "grpo", "ppo"):
        for labels in LABELS:
            on_policy = method in ("grpo", "ppo")
            evals = 1 if on_policy else 10
            cell = experiment(method, labels, rates.get(method, (1e-4, 3e-4, 1e-3)), longest[labels], TUNING_SEEDS, evals)
            cell = dataclasses.replace(cell, name=f"tune_{cell.name}")
            finished = run(cell, listener=say)
            for rate in sorted({lane["algo.learning_rate"] for lane in finished.lanes}):
                own = finished.eval_returns[[lane["algo.learning_rate"] == rate for lane in finished.lanes]]
                curve = " ".join(f"{mean:.2f}" for mean in own.mean(0)[-10:])
                print(f"{method} {labels} labels, learning rate {rate:g}: {curve}", flush=True)


def right_of(labels: int) -> int:
    """As many demonstrations as so many answers of the start had right ones, mean over seeds."""
    rate, updates = SETTINGS["filtered", labels]
    rows = read_run(run(experiment("filtered", labels, rate, updates), listener=say).path).rows
    return round(labels * float(np.mean([row["kept"] for row in rows if row.get("kept") is not None])))


def kl_to_start(path: Path, start: Path, number: int = 1024) -> list[float]:
    """KL of the policies of a run to those they started from, for each seed: of an answer, in nats, over answers of theirs."""
    cell = load(path)
    env = rljax.make_env(cell.env, **cell.env_params)
    model, key = cell.algo.model, jax.random.key(cell.eval_seed)
    policy = transformer(model, env.observation_space)

    @jax.jit
    @jax.vmap
    def measure(params: Any, before: Any) -> jax.Array:
        completions, _, _ = collect_samples(env, model, params, key, number)
        now, then = (log_probs(policy, p, completions)[0].sum(0) for p in (params, before))
        return (now - then).mean()

    states = [load_states(p)[1].params for p in (path, start)]
    trained = {name: value for name, value in states[0].items() if name in states[1]}  # the value head of PPO says nothing
    return [round(float(kl), 4) for kl in measure(trained, states[1])]


def scores(returns: np.ndarray) -> list[float]:
    return [round(float(share), 4) for share in np.asarray(returns).reshape(len(returns), -1).mean(1)]


def trained_cell(method: str, labels: int) -> dict[str, Any]:
    """One row of the table: accuracies of the greedy policies of all seeds, their KL, and what it cost."""
    if method == "sft_right":
        demonstrations = right_of(labels)
        rate, updates = SETTINGS["sft", labels]
    else:
        demonstrations = labels
        rate, updates = SETTINGS[method, labels]
    cell = dataclasses.replace(experiment(method, demonstrations, rate, updates), name=f"{method}_{labels}")
    finished = run(cell, listener=say)
    assert cell.start_from is not None
    return {
        "method": method,
        "labels": demonstrations,
        "budget": labels,
        "config": cell.hash,
        "accuracy": [round(float(x), 4) for x in finished.eval_returns[:, -1]],
        "longer": scores(evaluate(cell.path, overrides=LONGER)[1].returns),
        "other": scores(evaluate(cell.path, overrides=OTHER)[1].returns),
        "kl": kl_to_start(cell.path, cell.start_from.path),
        "seconds": read_run(cell.path).info["train_seconds"] / len(cell.seeds),
    }


def best_of_cell(labels: int, start: dict[str, Any]) -> dict[str, Any]:
    """Best of `N` by a reward model of so many labels. The policy stays what it was, and so does what it knows of other tasks."""
    cell = experiment("best_of", labels, *SETTINGS["reward_model", labels])
    run(cell, listener=say)
    longer = dataclasses.replace(cell, name=f"{cell.name}_longer", env_params={**cell.env_params, **{"digits": 3}})
    run(longer, listener=say)
    found = {}
    for name, path in (("accuracy", cell.path), ("longer", longer.path)):
        proxy, right = sample_answers(path, PROMPTS, N)
        pairs = zip(proxy, right.astype(float), strict=True)
        found[name] = [round(float(best_of_n(p, r, N).mean()), 4) for p, r in pairs]
        found[f"{name}_verified"] = [round(float(r.any(-1).mean()), 4) for r in right]
    assert cell.reward_from is not None
    return {
        "method": "best_of",
        "labels": labels,
        "budget": labels,
        "config": cell.hash,
        **found,
        "other": start["other"],
        "kl": [round(math.log(N) - (N - 1) / N, 4)] * len(cell.seeds),
        "seconds": read_run(cell.reward_from.path).info["train_seconds"] / len(cell.seeds),
    }


def measure() -> dict[str, Any]:
    start = load(HERE / "start.toml")
    run(start, listener=say)
    here = {"env_params.digits": 2, "env_params.min_digits": 0, "env_params.share": 1.0}
    before = {
        "accuracy": scores(evaluate(start.path, overrides=here)[1].returns),
        "longer": scores(evaluate(start.path, overrides={**here, **LONGER, "env_params.min_digits": 3})[1].returns),
        "other": scores(evaluate(start.path, overrides=OTHER)[1].returns),
    }
    cells = [
        best_of_cell(labels, before) if method == "best_of" else trained_cell(method, labels)
        for labels in LABELS
        for method in METHODS
    ]
    info = read_run(start.path).info
    return {
        "seeds": list(start.seeds),
        "start": before,
        "cells": cells,
        **{k: info[k] for k in ("versions", "platform", "finished")},
    }


def page(kept: dict[str, Any]) -> str:
    start, cells = kept["start"], kept["cells"]
    seeds = kept["seeds"]
    lines = [
        f"Seeds {seeds[0]} to {seeds[-1]}; IQM over seeds [95% bootstrap interval]; measured {kept['finished'][:10]}, "
        f"jax {kept['versions']['jax']}.",
        "",
        f"The start is right on {spread(start['accuracy'])} of the sums of up to two digits, on {spread(start['longer'])} of "
        f"those of up to three, and on {spread(start['other'])} of the words to reverse.",
    ]
    for budget in LABELS:
        own = [cell for cell in cells if cell["budget"] == budget]
        verified = next(cell for cell in own if cell["method"] == "best_of")
        lines += [
            "",
            f"**{budget:,} labels**",
            "",
            "| method | labels | accuracy | longer sums | reversing | KL to the start | seconds a seed |",
            "|---|---|---|---|---|---|---|",
        ]
        for cell in sorted(own, key=lambda cell: -iqm(cell["accuracy"])):
            values = (spread(cell["accuracy"]), spread(cell["longer"]), spread(cell["other"]), spread(cell["kl"], 1))
            lines.append(f"| {METHODS[cell['method']]} | {cell['labels']:,} | {' | '.join(values)} | {cell['seconds']:.1f} |")
        lines += [
            "",
            f"With the verifier at hand when it answers, the best of {N} is right on {spread(verified['accuracy_verified'])}, "
            f"and on {spread(verified['longer_verified'])} of the longer sums.",
        ]
    return "\n".join(lines) + "\n"


def draw(kept: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11.0, 4.2), layout="constrained", sharex=True)
    titles = {
        "accuracy": "sums of up to two digits",
        "longer": "sums of up to three digits",
        "other": "reversing, not trained again",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for i, (method, label) in enumerate(METHODS.items()):
            own = [cell for cell in kept["cells"] if cell["method"] == method]
            x = [cell["budget"] * 1.04 ** (i - 3) for cell in own]
            middle = np.array([iqm(cell[name]) for cell in own])
            bounds = np.array([bootstrap_interval(cell[name]) for cell in own]).T
            error = np.abs(bounds - middle)
            axis.errorbar(x, middle, error, label=label, color=f"C{i}", marker="o", ms=4, lw=1.2, capsize=2)
        axis.axhline(iqm(kept["start"][name]), color="0.5", lw=1, ls=":", label="the start")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xscale("log")
        axis.set_xticks(LABELS, [f"{n:,}" for n in LABELS])
        axis.minorticks_off()
        axis.set_xlabel("labels")
        axis.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("share of right answers")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=80)


if __name__ == "__main__":
    main(__doc__, RESULTS, PAGE, measure, draw, page, tune)
