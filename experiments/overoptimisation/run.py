"""The lab of rewards gone wrong: best-of-n, GRPO and PPO against a learned reward, and GRPO against two that are made by hand.

    python experiments/overoptimisation/run.py          # runs what has not been run, keeps what was measured, writes the page
    python experiments/overoptimisation/run.py --page   # writes the page again from what was kept

Gold is the verifier of the task, proxy what is paid instead. Each lane's curve of both against its KL to the policy that training
started from is kept in benchmarks/results/overoptimisation.json; docs/overoptimisation.md and its figure are made of that.
"""

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rljax.experiment import Experiment, load, result, run, sample_answers
from rljax.experiment.report import read_run
from rljax.experiment.statistics import best_of_n, bootstrap_interval, iqm

sys.path.insert(0, str(Path(__file__).parents[1]))
from labs import main, spread

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "overoptimisation.json"
PAGE, FIGURE = ROOT / "docs" / "overoptimisation.md", ROOT / "docs" / "overoptimisation.png"
CONFIGS = ("grpo", "ppo", "grpo_contains", "grpo_length")
TITLES = {
    "grpo": "GRPO, learned reward",
    "ppo": "PPO, learned reward",
    "grpo_contains": "GRPO, paid for containing the answer",
    "grpo_length": "GRPO, paid for length",
}
PROMPTS, SAMPLES = 128, 64  # of best-of-n


def lane_curves(experiment: Experiment) -> list[dict[str, Any]]:
    """KL, proxy and gold of each lane at every row of its metrics, and gold of its greedy policy at the end."""
    finished = run(experiment, listener=say)
    rows = [row for row in read_run(finished.path).rows if row.get("reward/exact") is not None]
    curves = []
    for lane, greedy in zip(finished.lanes, finished.eval_returns, strict=True):
        own = [row for row in rows if row["lane"] == lane["lane"]]
        keys = {
            "step": "step",
            "kl": "kl_reference/episode",
            "proxy": "episode/return",
            "gold": "reward/exact",
            "length": "episode/length",
        }
        curve = {name: [round(row[key], 4) for row in own] for name, key in keys.items()}
        curves.append({"seed": lane["seed"], "kl_coef": lane["algo.kl_coef"], **curve, "greedy": round(float(greedy[-1]), 4)})
    return curves


def best_of(experiment: Experiment) -> list[dict[str, Any]]:
    """Gold and proxy of the best by the proxy of n answers of the policy that training starts from, for each seed."""
    still = dataclasses.replace(experiment, sweep={}, name="best_of_n", total_steps=1, evals=1)
    still = dataclasses.replace(still, algo=dataclasses.replace(still.algo, learning_rate=0.0))
    path = run(still, listener=say).path
    proxy, right = sample_answers(path, PROMPTS, SAMPLES)
    numbers = [2**i for i in range(int(math.log2(SAMPLES)) + 1)]

    def mean(values: np.ndarray, lane: int) -> list[float]:
        return [round(float(best_of_n(proxy[lane], values[lane], n).mean()), 4) for n in numbers]

    kl = [round(math.log(n) - (n - 1) / n, 4) for n in numbers]
    return [
        {"seed": seed, "n": numbers, "kl": kl, "proxy": mean(proxy, i), "gold": mean(right.astype(float), i)}
        for i, seed in enumerate(still.seeds)
    ]


def quality(experiment: Experiment) -> list[dict[str, Any]]:
    """Held-out accuracy and calibration of the reward model of each seed."""
    source = experiment.reward_from
    assert source is not None
    finished = result(source.path, states=())
    rows = read_run(source.path).rows
    judged = []
    for lane, accuracy in zip(finished.lanes, finished.eval_returns, strict=True):
        last = [row for row in rows if row["lane"] == lane["lane"] and row.get("heldout/calibration_error") is not None][-1]
        names = ("calibration_error", "nll")
        judged.append(
            {
                "seed": lane["seed"],
                "accuracy": round(float(accuracy[-1]), 4),
                **{k: round(last[f"heldout/{k}"], 4) for k in names},
            }
        )
    return judged


def measure() -> dict[str, Any]:
    experiments = {name: load(HERE / f"{name}.toml") for name in CONFIGS}
    info: dict[str, Any] = {"configs": {name: e.hash for name, e in experiments.items()}, "curves": {}}
    for name, experiment in experiments.items():
        info["curves"][name] = lane_curves(experiment)
        last = read_run(experiment.path).info
        info |= {key: last[key] for key in ("versions", "platform", "finished")}
    info["best_of_n"] = best_of(experiments["grpo"])
    info["reward_model"] = quality(experiments["grpo"])
    return info


def say(event: dict[str, Any]) -> None:
    if "text" in event:
        print(event["text"], flush=True)
    elif "step" in event and event.get("evaluation") is not None:
        print(f"{event['step']:,}/{event['total']:,}", flush=True)


def of_coef(curves: list[dict[str, Any]], coef: float) -> list[dict[str, Any]]:
    return [curve for curve in curves if curve["kl_coef"] == coef]


def coefs(curves: list[dict[str, Any]]) -> list[float]:
    return sorted({curve["kl_coef"] for curve in curves})


def smooth(values: list[float], window: int = 3) -> np.ndarray:
    """Means of so many rows: one row is one sample of a few hundred episodes."""
    return np.convolve(values, np.ones(window) / window, "valid")


def table(curves: list[dict[str, Any]]) -> list[str]:
    """A row for each leash. The end is the mean of the last three rows of each seed."""
    head = (
        "kl_coef",
        "KL at the end",
        "proxy: first",
        "proxy: end",
        "gold: first",
        "gold: highest",
        "at KL",
        "gold: end",
        "gold lost",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for coef in coefs(curves):
        own = of_coef(curves, coef)
        gold, kl, proxy = (np.stack([smooth(curve[name]) for curve in own]) for name in ("gold", "kl", "proxy"))
        top = int(gold.mean(0).argmax())
        cells = (
            f"{coef:g}",
            spread(list(kl[:, -1]), 1),
            f"{proxy[:, 0].mean():.2f}",
            spread(list(proxy[:, -1])),
            f"{gold[:, 0].mean():.2f}",
            f"{gold[:, top].mean():.2f}",
            f"{kl[:, top].mean():.1f}",
            spread(list(gold[:, -1])),
            spread(list(gold[:, top] - gold[:, -1])),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def words(curves: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Where gold turned, and whether the leash held it."""
    lines = []
    for name in ("grpo", "ppo"):
        ends = {coef: [float(smooth(c["gold"])[-1]) for c in of_coef(curves[name], coef)] for coef in coefs(curves[name])}
        free = ends.pop(0.0)
        best = max(ends, key=lambda coef: iqm(ends[coef]))
        apart = bootstrap_interval(free)[1] < bootstrap_interval(ends[best])[0]
        kls = [iqm([float(smooth(c["kl"])[-1]) for c in of_coef(curves[name], coef)]) for coef in coefs(curves[name])]
        falls = all(a > b for a, b in itertools.pairwise(kls))
        lines.append(
            f"- {TITLES[name]}: without a leash gold ends at {spread(free)}, with `kl_coef` {best:g} at {spread(ends[best])}; "
            f"the intervals {'are apart' if apart else 'overlap'}. The final KL {'falls' if falls else 'does not fall steadily'} "
            f"with `kl_coef`: {', '.join(f'{kl:.1f}' for kl in kls)}."
        )
    return lines


def draw(kept: dict[str, Any]) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10.0, 7.0), layout="constrained")
    for axis, (name, curves) in zip(axes.flat, kept["curves"].items(), strict=True):
        other = axis.twinx()
        for i, coef in enumerate(coefs(curves)):
            own = of_coef(curves, coef)
            x = np.sqrt(np.maximum(np.mean([smooth(c["kl"]) for c in own], 0), 0.0))
            gold = np.stack([smooth(c["gold"]) for c in own])
            low, high = np.array([bootstrap_interval(list(column), resamples=1000) for column in gold.T]).T
            axis.plot(x, gold.mean(0), color=f"C{i}", label=f"kl_coef {coef:g}")
            axis.fill_between(x, low, high, color=f"C{i}", alpha=0.2, lw=0)
            other.plot(x, np.mean([smooth(c["proxy"]) for c in own], 0), color=f"C{i}", ls=":", lw=1)
        if name == "grpo":
            best = kept["best_of_n"]
            x = np.sqrt(best[0]["kl"])
            axis.plot(x, np.mean([b["gold"] for b in best], 0), "k.-", label="best of n")
            other.plot(x, np.mean([b["proxy"] for b in best], 0), "k:", lw=1)
        axis.set_title(TITLES[name], loc="left", fontsize=10)
        axis.set_xlabel("square root of the KL to the start")
        axis.set_ylabel("gold: share of right answers")
        other.set_ylabel("proxy (dotted)")
        axis.set_ylim(-0.02, 1.02)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=80)


def page(kept: dict[str, Any]) -> str:
    seeds = [curve["seed"] for curve in of_coef(kept["curves"]["grpo"], 0.0)]
    judged = kept["reward_model"]
    when = f"measured {kept['finished'][:10]}, jax {kept['versions']['jax']}"
    lines = [f"Seeds {seeds[0]} to {seeds[-1]}; IQM over seeds [95% bootstrap interval]; {when}.", ""]
    lines += [
        "The reward model ranks "
        + spread([j["accuracy"] for j in judged])
        + " of held-out pairs right; its expected calibration error is "
        + spread([j["calibration_error"] for j in judged])
        + ".",
        "",
        *words(kept["curves"]),
        "",
    ]
    for name, curves in kept["curves"].items():
        lines += [
            f"**{TITLES[name]}** (`experiments/overoptimisation/{name}.toml`, config hash `{kept['configs'][name]}`)",
            "",
            *table(curves),
            "",
        ]
    best = kept["best_of_n"]
    lines += [
        f"**Best of n by the learned reward**, {PROMPTS} prompts a seed",
        "",
        "| n | KL, at most | proxy | gold |",
        "|---|---|---|---|",
    ]
    for i, n in enumerate(best[0]["n"]):
        lines.append(
            f"| {n} | {best[0]['kl'][i]:.2f} | {spread([b['proxy'][i] for b in best])} | {spread([b['gold'][i] for b in best])} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(__doc__, RESULTS, PAGE, measure, draw, page)
