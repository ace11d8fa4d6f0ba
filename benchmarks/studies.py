"""Keeps what the studies under experiments/studies/ measured, and writes the tables of docs/studies.md.

    rljax run experiments/studies/reinforce_baselines.toml && rljax run experiments/studies/scaled_rewards.toml
    python benchmarks/studies.py runs/reinforce_baselines/* runs/scaled_rewards/*      # add or replace runs, then write the page
    python benchmarks/studies.py                                                       # write the page again

A study of static options is several runs. A file holds, for every setting and seed, the last evaluation and what the table needs.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np

from rljax.experiment import load_run, result
from rljax.experiment.report import read_run
from rljax.experiment.statistics import bootstrap_interval, iqm

HERE = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "studies.md"
RETURNS = (20, 50, 100, 200, 400)  # of training: where policies are about as good, gradients can be compared


def collect(paths: list[str]) -> None:
    studies: dict[str, dict] = {}
    for path in paths:
        experiment, run, files = load_run(path), result(path, states=()), read_run(path)
        study = studies.setdefault(
            experiment.name, {"env": experiment.env, "steps": int(run.eval_steps[-1]), "versions": {}, "settings": {}}
        )
        study["versions"] = {key: files.info["versions"][key] for key in ("python", "rljax", "jax")}
        static = {"algo.baseline": getattr(experiment.algo, "baseline", None)}
        static["algo.normalize_rewards"] = getattr(experiment.algo, "normalize_rewards", None)
        for lane, returns in zip(run.lanes, run.eval_returns, strict=True):
            swept = {key: value for key, value in lane.items() if key not in ("lane", "seed")}
            options = {key.split(".")[-1]: value for key, value in {**static, **swept}.items() if value is not None}
            label = ", ".join(f"{key} {str(value).lower()}" for key, value in options.items())
            rows = [row for row in files.rows if row["lane"] == lane["lane"]]
            study["settings"].setdefault(label, []).append(
                {"seed": lane["seed"], "return": round(float(returns[-1]), 4), "variance": variances(rows)}
            )
    for name, study in studies.items():
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


def table(study: dict) -> list[str]:
    has_variance = any(any(seed["variance"]) for seeds in study["settings"].values() for seed in seeds)
    bands = [f"variance at {low} to {high}" for low, high in itertools.pairwise(RETURNS)] if has_variance else []
    lines = [f"| setting | seeds | return, IQM [95%] |{''.join(f' {band} |' for band in bands)}"]
    lines += ["|---|---|---|" + "---|" * len(bands)]
    for label, seeds in study["settings"].items():
        final = np.array([seed["return"] for seed in seeds])
        low, high = bootstrap_interval(final)
        cells = [label, str(len(seeds)), f"{iqm(final):.1f} [{low:.1f}, {high:.1f}]"]
        for band in range(len(bands)):
            values = [seed["variance"][band] for seed in seeds if seed["variance"][band] is not None]
            cells.append(f"{np.median(values):,.0f} ({len(values)} seeds)" if values else "-")
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{package} {version}" for package, version in study["versions"].items())
    return [*lines, "", f"{study['env']}, {study['steps']:,} steps a seed; {versions}."]


def write_page() -> None:
    """Puts each study's table after its marker ``<!-- name -->``, up to the next heading."""
    text = PAGE.read_text()
    for path in sorted(HERE.glob("study_*.json")):
        marker = f"<!-- {path.stem.removeprefix('study_')} -->"
        head, _, rest = text.partition(marker)
        _, heading, tail = rest.partition("\n## ")
        text = head + marker + "\n\n" + "\n".join(table(json.loads(path.read_text()))) + "\n" + heading + tail
    PAGE.write_text(text)


if __name__ == "__main__":
    collect(sys.argv[1:])
    write_page()
