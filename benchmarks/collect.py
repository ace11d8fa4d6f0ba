"""Keeps what finished runs measured: one JSON file a run under benchmarks/results/, and the tables of docs/results.md.

    python benchmarks/collect.py runs/ppo_cartpole/0123456789ab ...   # add or replace runs, then write the page
    python benchmarks/collect.py                                      # write the page again

A file holds the config, versions, step counts, times and the evaluation return of every seed at every evaluation; the page holds
nothing that is not in a file.
"""

import json
import sys
from pathlib import Path

import numpy as np

from rljax.experiment import InputError, load_run, result
from rljax.experiment.report import read_run
from rljax.experiment.statistics import bootstrap_interval, iqm

HERE = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
MARKER = "<!-- results -->"
SPEED = """Environment steps a second of training, compilation apart, medians of rounds in which the contenders take turns
(`benchmarks/speed/ppo.py`). `rljax` returns the training return alone, as the peers' programs do; `rljax-logged` computes and
returns every metric. With several seeds rljax spreads them over two host devices, and the peers map theirs on one. rejax clips
gradients by value and has no setting for Adam's epsilon; the peers need gymnax 0.0.9. Targets: one seed 1.3 times rejax and
purejaxrl, eight seeds 1.7, 2,048 environments 1.2, Stable-Baselines3 30."""
# What to reach, greedy IQM over seeds, and whose figure it is.
TARGETS = {
    "ppo_cartpole": ("500 within 500k", "rl-baselines3-zoo, PPO at 100k"),
    "ppo_acrobot": (">= -80 within 1M", "-73.5, rl-baselines3-zoo, PPO at 1M"),
    "ppo_pendulum": (">= -180 within 200k", "-172, rl-baselines3-zoo, PPO at 100k"),
    "ppo_breakout": (">= 25 within 10M", "28, gymnax README, PPO at 10M"),
    "ppo_inverted_pendulum": ("1000", "the most that 1,000 steps pay"),
    "ppo_ant": ("clearly climbing", "brax's own PPO at equal settings, below"),
}


def collect(path: str) -> None:
    """Writes the file of one finished run."""
    run, info = result(path, states=()), read_run(path).info
    if info["status"] != "finished":
        raise InputError(f"{path} has not finished: {info['status']}")
    keep = (
        "name", "config_hash", "env", "agent", "commit", "dirty", "versions", "platform", "devices", "started", "finished",
        "steps_asked", "steps_done", "steps_per_second", "wall_seconds", "compile_seconds", "random", "failed", "lanes",
    )  # fmt: skip
    config = load_run(path).to_dict()
    del config["out"]
    data = {key: info[key] for key in keep} | {"config": config, "eval_steps": run.eval_steps.tolist()}
    data["eval_returns"] = [[None if np.isnan(x) else round(x, 4) for x in lane] for lane in run.eval_returns.tolist()]
    HERE.mkdir(exist_ok=True)
    (HERE / f"{info['name']}.json").write_text(json.dumps(data, indent=1) + "\n")


def row(data: dict) -> str:
    """A line of the table; a failed seed is named and left out of the IQM."""
    failed = {failure["lane"] for failure in data["failed"]}
    final = np.array([lane[-1] for i, lane in enumerate(data["eval_returns"]) if i not in failed], float)
    low, high = bootstrap_interval(final)
    target, source = TARGETS.get(data["name"], ("", ""))
    failures = ", ".join(f"seed {failure['seed']}" for failure in data["failed"]) or "none"
    return (
        f"| {data['agent']} | {data['env']} | {data['steps_done']:,} | {len(final)} "
        f"| **{iqm(final):.1f}** [{low:.1f}, {high:.1f}] | "
        f"{final.min():.1f} to {final.max():.1f} | {data['random']['return']:.1f} | {failures} | {target} | {source} |"
    )


def write_page() -> None:
    """Replaces what follows the marker in docs/results.md."""
    runs = [json.loads(path.read_text()) for path in sorted(HERE.glob("ppo_*.json"))]
    lines = [
        "| agent | environment | steps per seed | seeds | IQM [95%] | range over seeds | random | failed | target | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(row, runs),
        "",
        "Greedy returns of the last evaluation; interval: stratified bootstrap over seeds. How each was made:",
        "",
    ]
    for run in runs:
        v = run["versions"]
        episodes = run["config"]["eval_episodes"]
        lines.append(
            f"- `experiments/{run['name']}.toml --seeds {' '.join(map(str, run['config']['seeds']))}`, config hash "
            f"`{run['config_hash']}`: {episodes} evaluation episodes a seed, "
            f"{run['wall_seconds']:.0f} s wall of which {run['compile_seconds']:.0f} s compiling, on {len(run['devices'])} host "
            f"devices ({run['platform']}); Python {v['python']}, jax {v['jax']}, {run['finished'][:10]}. "
            f"Per-seed data: `benchmarks/results/{run['name']}.json`."
        )
    lines += speed()
    head = PAGE.read_text().split(MARKER)[0]
    PAGE.write_text(head + MARKER + "\n\n" + "\n".join(lines) + "\n")


def speed() -> list[str]:
    """The tables of benchmarks/speed/ppo.py."""
    path = HERE / "speed_ppo.json"
    if not path.exists():
        return []
    lines = ["", "## Speed", "", SPEED]
    for name, case in json.loads(path.read_text()).items():
        s, machine = case["settings"], case["machine"]
        many = f"{s['seeds']} seeds" if s["seeds"] > 1 else "one seed"
        lines += [
            "",
            f"**{name}**: {s['env']}, {many}, {s['num_envs']:,} environments x {s['num_steps']} steps; {s['rounds']} rounds on "
            f"{machine['cpus']} cores, {case['date'][:10]}.",
            "",
            "| | steps/s | range | rljax / it | compile | mean training return | versions |",
            "|---|---|---|---|---|---|---|",
        ]
        for contender, data in case["contenders"].items():
            rates = sorted(r["steps"] / r["seconds"] for r in data["rounds"])
            ratios = [
                ours["steps"] / ours["seconds"] * theirs["seconds"] / theirs["steps"]
                for ours, theirs in zip(case["contenders"]["rljax"]["rounds"], data["rounds"], strict=True)
            ]
            versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
            lines.append(
                f"| {contender} | {np.median(rates):,.0f} | {rates[0]:,.0f} to {rates[-1]:,.0f} "
                f"| {np.median(ratios):.2f} | {data['compile_seconds']:.1f} s "
                f"| {np.mean([r['mean_return'] for r in data['rounds']]):.0f} | {versions} |"
            )
    return lines


if __name__ == "__main__":
    for directory in sys.argv[1:]:
        collect(directory)
    write_page()
