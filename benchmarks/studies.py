"""Keeps what the studies under experiments/studies/ measured, and writes the tables of docs/studies.md.

    rljax run experiments/studies/scaled_rewards.toml && rljax run experiments/studies/shaping.toml
    python benchmarks/studies.py runs/scaled_rewards/* runs/shaping/*      # add or replace studies, then write the page
    python benchmarks/studies.py                                           # write the page again

A study of static options is several runs. A file holds, for every setting and seed, the last evaluation, the
last return of training and what else the table needs. A setting is named by the options that differ between settings.
"""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rljax.experiment import load_run, result
from rljax.experiment.report import read_run
from rljax.experiment.statistics import bootstrap_interval, iqm

HERE = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "studies.md"
RETURNS = (20, 50, 100, 200, 400)  # of training: where policies are about as good, gradients can be compared
# Studies whose evaluations measure a share of episodes, and its name. A seed's is often 0 or 1: an IQM would drop the rarer one.
SHARES = {"shaping": "goal share"}


def collect(paths: list[str]) -> None:
    studies: dict[str, dict] = {}
    for path in paths:
        experiment, run, files = load_run(path), result(path, states=()), read_run(path)
        study = studies.setdefault(
            experiment.name, {"env": experiment.env, "steps": int(run.eval_steps[-1]), "versions": {}, "settings": {}}
        )
        study["versions"] = {key: files.info["versions"][key] for key in ("python", "rljax", "jax")}
        static = {key: getattr(experiment.algo, key, None) for key in ("baseline", "normalize_rewards")}
        for lane, returns in zip(run.lanes, run.eval_returns, strict=True):
            swept = {key.split(".")[-1]: value for key, value in lane.items() if key not in ("lane", "seed")}
            rows = [row for row in files.rows if row["lane"] == lane["lane"]]
            training = [row["episode/return"] for row in rows if row.get("episode/return") is not None]
            study["settings"].setdefault(tuple({**static, **swept}.items()), []).append(
                {
                    "seed": lane["seed"],
                    "return": round(float(returns[-1]), 4),
                    "training": round(training[-1], 4),
                    "variance": variances(rows),
                }
            )
    for name, study in studies.items():
        constant = set.intersection(*map(set, study["settings"]))
        study["settings"] = {
            ", ".join(f"{key} {str(value).lower()}" for key, value in options if (key, value) not in constant): seeds
            for options, seeds in study["settings"].items()
        }
        (HERE / f"study_{name}.json").write_text(json.dumps(study, indent=1) + "\n")


def variances(rows: list[dict]) -> list[float | None]:
    """Mean variance of the gradient while the training return lies between two of `RETURNS`."""
    seen: list[list[float]] = [[] for _ in RETURNS[1:]]
    for row in rows:
        if row.get("gradient_variance") is not None and row["episode/return"] is not None:
            band = int(np.searchsorted(RETURNS, row["episode/return"], "right")) - 1
            if 0 <= band < len(seen):
                seen[band].append(row["gradient_variance"])
    return [float(np.mean(values)) if values else None for values in seen]


def table(name: str, study: dict) -> list[str]:
    has_variance = any(any(seed["variance"]) for seeds in study["settings"].values() for seed in seeds)
    has_training = all("training" in seed for seeds in study["settings"].values() for seed in seeds)
    heads = ["setting", "seeds", f"{SHARES[name]}, mean [95%]" if name in SHARES else "return, IQM [95%]"]
    heads += ["training return, IQM [95%]"] * has_training
    heads += [f"variance at {low} to {high}" for low, high in itertools.pairwise(RETURNS)] * has_variance
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for label, seeds in study["settings"].items():
        final = [seed["return"] for seed in seeds]
        cells = [label, str(len(seeds)), interval(final, np.mean, 2) if name in SHARES else interval(final, iqm, 1)]
        if has_training:
            cells.append(interval([seed["training"] for seed in seeds], iqm, 2))
        for band in range(len(RETURNS) - 1) if has_variance else ():
            values = [seed["variance"][band] for seed in seeds if seed["variance"][band] is not None]
            cells.append(f"{np.median(values):,.0f} ({len(values)} seeds)" if values else "-")
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{package} {version}" for package, version in study["versions"].items())
    return [*lines, "", f"{study['env']}, {study['steps']:,} steps a seed; {versions}."]


def interval(scores: list[float], statistic: Callable, digits: int) -> str:
    low, high = bootstrap_interval(scores, statistic)
    return f"{statistic(np.array(scores)):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def write_page() -> None:
    """Puts each study's table after its marker ``<!-- name -->``, up to the next heading."""
    text = PAGE.read_text()
    for path in sorted(HERE.glob("study_*.json")):
        name = path.stem.removeprefix("study_")
        marker = f"<!-- {name} -->"
        head, _, rest = text.partition(marker)
        _, heading, tail = rest.partition("\n## ")
        text = head + marker + "\n\n" + "\n".join(table(name, json.loads(path.read_text()))) + "\n" + heading + tail
    PAGE.write_text(text)


if __name__ == "__main__":
    collect(sys.argv[1:])
    write_page()
