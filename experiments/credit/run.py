"""Credit and the horizon: which step of a long answer was the mistake, told by its end alone, by a value, or by each step.

    python experiments/credit/run.py          # runs what has not been run, keeps what was measured, writes the page
    python experiments/credit/run.py --page   # writes the page again from what was kept

Running sums of 4, 8 and (GRPO alone) 12 digits, from a start that is right about as often as a coin falls heads at every step.
What each seed reaches is kept in benchmarks/results/credit.json; docs/credit.md and its figure are made of that.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rljax.experiment import Experiment, load, run
from rljax.experiment.report import read_run
from rljax.experiment.statistics import bootstrap_interval, iqm

sys.path.insert(0, str(Path(__file__).parents[1]))
from labs import main, say, spread

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "credit.json"
PAGE, FIGURE = ROOT / "docs" / "credit.md", ROOT / "docs" / "credit.png"
TERMS = (4, 8, 12)
CONFIGS = {"grpo": TERMS, "ppo": (4, 8), "ppo_discount": (4, 8)}  # twelve digits of PPO take half an hour on two cores
EPISODES = 30_720  # of each seed, whatever the length


def cell(name: str, terms: int) -> Experiment:
    """A config at one length, for as many answers as at every other."""
    changes = {"env_params.terms": terms, "name": f"{name}_{terms}", "total_steps": EPISODES * (terms + 1)}
    return load(HERE / f"{name}.toml", changes)


def measure() -> dict[str, Any]:
    """Shares of right answers in samples of the policy, at every row of the metrics, of each lane."""
    kept: dict[str, Any] = {"lanes": [], "configs": {}}
    for name, lengths in CONFIGS.items():
        for terms in lengths:
            experiment = cell(name, terms)
            finished = run(experiment, listener=say)
            record = read_run(finished.path)
            kept["configs"][f"{name}_{terms}"] = experiment.hash
            kept |= {key: record.info[key] for key in ("versions", "platform", "finished")}
            for lane in finished.lanes:
                rows = [r for r in record.rows if r["lane"] == lane["lane"] and r.get("reward/exact") is not None]
                kept["lanes"].append(
                    {
                        "method": name.removesuffix("_discount"),
                        "terms": terms,
                        "seed": lane["seed"],
                        "process": lane["env_params.process"],
                        "gae_lambda": lane.get("algo.gae_lambda"),
                        "discount": lane.get("algo.discount", 1.0),
                        "step": [r["step"] for r in rows],
                        "exact": [round(r["reward/exact"], 4) for r in rows],
                        "steps": [round(r["reward/steps"], 4) for r in rows],
                    }
                )
    return kept


def settings(kept: dict[str, Any]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Lanes by ``(what told good from bad, process)``."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for lane in kept["lanes"]:
        label = "GRPO"
        if lane["method"] == "ppo":
            label = f"PPO, lambda {lane['gae_lambda']:g}"
            label += f", discount {lane['discount']:g}" if lane["discount"] != 1.0 else ""
        found.setdefault((label, lane["process"]), []).append(lane)
    return found


def at_end(lanes: list[dict[str, Any]], terms: int, name: str = "exact") -> list[float]:
    """Mean of the last three rows of each seed."""
    return [float(np.mean(lane[name][-3:])) for lane in lanes if lane["terms"] == terms]


def page(kept: dict[str, Any]) -> str:
    found = settings(kept)
    seeds = sorted({lane["seed"] for lane in kept["lanes"]})
    first = [np.mean([lane["exact"][0] for lane in kept["lanes"] if lane["terms"] == terms]) for terms in TERMS]
    begin = ", ".join(f"{share:.4f}" for share in first)
    lines = [
        f"Seeds {seeds[0]} to {seeds[-1]}; share of samples that are right after {EPISODES:,} answers, IQM over seeds [95% "
        f"bootstrap interval]; measured {kept['finished'][:10]}, jax {kept['versions']['jax']}. In the first of all rows it is "
        f"{begin} at {', '.join(map(str, TERMS))} digits.",
    ]
    for process, title in ((0.0, "Paid at the end"), (1.0, "Each right step paid as well")):
        lines += ["", f"**{title}**", "", "| | " + " | ".join(f"{terms} digits" for terms in TERMS) + " |"]
        lines.append("|---" * (len(TERMS) + 1) + "|")
        for (label, paid), lanes in found.items():
            if paid == process:
                ends = [at_end(lanes, terms) for terms in TERMS]
                lines.append(f"| {label} | " + " | ".join(spread(end) if end else "not run" for end in ends) + " |")
    return "\n".join(lines) + "\n"


def draw(kept: dict[str, Any]) -> None:
    found = settings(kept)
    figure, axes = plt.subplots(1, 2, figsize=(10.0, 4.2), layout="constrained", sharey=True)
    labels = list(dict.fromkeys(label for label, _ in found))
    for axis, (process, title) in zip(axes, ((0.0, "paid at the end"), (1.0, "each right step paid as well")), strict=True):
        for i, label in enumerate(labels):
            if (label, process) not in found:
                continue
            lanes = found[label, process]
            lengths = [terms for terms in TERMS if at_end(lanes, terms)]
            middle = np.array([iqm(at_end(lanes, terms)) for terms in lengths])
            bounds = np.array([bootstrap_interval(at_end(lanes, terms)) for terms in lengths]).T
            x = np.array(lengths) + 0.12 * (i - len(labels) / 2)
            style = "--" if "discount" in label else "-"
            axis.errorbar(x, middle, np.abs(bounds - middle), label=label, color=f"C{i}", ls=style, marker="o", ms=4, capsize=2)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xticks(TERMS)
        axis.set_xlabel("digits: steps of an answer")
        axis.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("share of samples that are right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(FIGURE, dpi=80)


if __name__ == "__main__":
    main(__doc__, RESULTS, PAGE, measure, draw, page)
