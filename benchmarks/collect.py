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

from rljax.experiment import InputError, load_run, page, result
from rljax.experiment.config import SOURCES
from rljax.experiment.report import read_run
from rljax.experiment.statistics import bootstrap_interval, bootstrap_intervals, iqm

HERE = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
CURVES = PAGE.with_suffix(".png")
MARKER = "<!-- results -->"
SPEED = """Steps a second of training, of the environments and offline of the gradient, all seeds together, compilation apart:
medians of rounds in which the contenders take turns (`benchmarks/speed/compare.py`). Of the online agents, `rljax` returns the
training return alone, as the peers' programs do, and `rljax-logged` computes and returns every metric. Several seeds are spread
over two host devices. What is not equal is said in the docstrings of `benchmarks/speed/worker.py`. rejax and purejaxrl need
gymnax 0.0.9."""
# What is special about an algorithm; its file of speeds is shown if there is one.
SPEED_OF = {
    "ppo": """The peers map several seeds on one device. rejax clips gradients by value and has no setting for Adam's epsilon. The
return is that of training, and of an evaluation for rejax and brax. Targets: one seed 1.3 times rejax and purejaxrl, eight seeds
1.7, 2,048 environments 1.2, Stable-Baselines3 30. Where there are two cores, XLA hands operations of one seed from one to the
other; with every metric that costs a fifth, and `taskset -c 0 rljax run ...` keeps them on one.""",
    "dqn": """One gradient step follows each step of all environments. Filling the buffer at first is not timed. The return is of
32 episodes after training. rejax draws a batch without replacement, at a cost that grows with the buffer. Against SBX, both take
Huber's loss and no double Q, as it does; its two layers have 120 units each.""",
    "sac": """As for DQN. rejax and SBX update policy, critics and temperature one after the other, and rljax all at once.""",
    "offline": """Gradient steps on the same synthetic data. orlax is the one released package found that has all three in JAX;
its loop is in Python, and `orlax-scan` puts its update into one `lax.scan` over data on the device, which the package does not
do. d3rlpy is PyTorch, on one thread. Q of recorded actions and the squared TD error, at the end of equally many gradient steps,
show whether the same is learnt. orlax's CQL learns something else: its policy is not squashed, and the actions of its penalty
are not divided by their density.""",
}
# What to reach, greedy IQM over seeds, and whose figure it is.
TARGETS = {
    "ppo_cartpole": ("500 within 500k", "rl-baselines3-zoo, PPO at 100k"),
    "ppo_acrobot": (">= -80 within 1M", "-73.5, rl-baselines3-zoo, PPO at 1M"),
    "ppo_pendulum": (">= -180 within 200k", "-172, rl-baselines3-zoo, PPO at 100k"),
    "ppo_breakout": (">= 25 within 10M", "28, gymnax README, PPO at 10M"),
    "ppo_inverted_pendulum": ("1000", "the most that 1,000 steps pay"),
    "ppo_ant": ("clearly climbing", "brax's own PPO at equal settings, below"),
    "ppo_hopper": ("an hour's steps", "brax's own PPO at equal settings, below"),
    "sac_hopper": ("an hour's steps", "825, the untrained policy, which stands still"),
    "ppo_mountain_car": (">= -110 within 1M", "-110, rl-baselines3-zoo, PPO at 1M"),
    "ppo_mountain_car_continuous": (">= 92", "92, gymnax README"),
    "ppo_inverted_double_pendulum": ("9360", "the most that 1,000 steps pay"),
    "ppo_fast": ("> 135 within 2^15", "brax's own tests, PPO"),
    "sac_fast": ("> 139.3 within 2^15", "brax's own tests, SAC"),
    "ppo_memory_chain": ("1", "the most that an episode pays"),
    "ppo_stateless_cartpole": ("500", "the most that 500 steps pay"),
    "ppo_tictactoe": ("0.960", "the best play, by enumeration"),
    "a2c_cartpole": ("500 within 500k", "rl-baselines3-zoo, A2C at 500k"),
    "a2c_acrobot": (">= -83 within 500k", "-83, rl-baselines3-zoo, A2C at 500k"),
    "dqn_cartpole": ("500 within 50k", "rl-baselines3-zoo, DQN at 50k"),
    "dqn_acrobot": (">= -76.6 within 100k", "-76.6, rl-baselines3-zoo, DQN at 100k"),
    "dqn_mountain_car": (">= -101 within 120k", "-101, rl-baselines3-zoo, DQN at 120k"),
    "c51_cartpole": ("500 within 50k", "as for DQN"),
    "pqn_cartpole": ("500", "the most that 500 steps pay"),
    "pqn_breakout": (">= 25 within 10M", "28, gymnax README, PPO at 10M"),
    "dqn_breakout": ("clearly climbing", "28, gymnax README, PPO at 10M"),
    "reinforce_cartpole": ("500", "the most that 500 steps pay"),
    "grpo_cartpole": ("500", "the most that 500 steps pay"),
    "dpo_addition": ("", "share of right answers; from 0.28"),
    "sft_addition": ("0.2 to 0.4", "share of right answers; where grpo_addition begins"),
    "grpo_addition": (">= 0.95", "share of right answers"),
    "grpo_addition_cold": ("flat", "without the warm start"),
    "sft_multiplication": ("", "share of right answers; where grpo_multiplication begins"),
    "grpo_multiplication": ("1", "share of right answers, with a calculator"),
    "sft_multiplication_no_tool": ("", "where grpo_multiplication_no_tool begins"),
    "grpo_multiplication_no_tool": ("", "share of right answers by heart"),
    "grpo_smollm2": ("", "1.5 is the most; rises from 0.503"),
    "sac_pendulum": (">= -157 within 20k", "-157, rl-baselines3-zoo, SAC at 20k"),
    "td3_pendulum": (">= -152 within 20k", "-152, rl-baselines3-zoo, TD3 at 20k"),
}


def without_places(config: dict) -> None:
    """Drops where a run, and those that it starts from or is paid by, were made."""
    config.pop("out", None)
    for key in SOURCES:
        if key in config:
            without_places(config[key])


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
    without_places(config)
    data = {key: info[key] for key in keep} | {"config": config, "eval_steps": run.eval_steps.tolist()}
    data["eval_returns"] = [[None if np.isnan(x) else round(x, 4) for x in lane] for lane in run.eval_returns.tolist()]
    HERE.mkdir(exist_ok=True)
    (HERE / f"{info['name']}.json").write_text(json.dumps(data, indent=1) + "\n")


def last_returns(data: dict) -> np.ndarray:
    """Of the seeds that did not fail."""
    failed = {failure["lane"] for failure in data["failed"]}
    return np.array([lane[-1] for i, lane in enumerate(data["eval_returns"]) if i not in failed], float)


def score(final: np.ndarray) -> str:
    low, high = bootstrap_interval(final)
    d = decimals(final)
    return f"**{iqm(final):.{d}f}** " + (f"[{low:.{d}f}, {high:.{d}f}]" if len(final) > 1 else "(one seed: no interval)")


def decimals(final: np.ndarray) -> int:
    return 1 if np.abs(final).max() >= 10 else 3


def row(data: dict) -> str:
    """A line of the table; a failed seed is named and left out of the IQM."""
    final = last_returns(data)
    target, source = TARGETS.get(data["name"], ("", ""))
    digits = decimals(final)
    failures = ", ".join(f"seed {failure['seed']}" for failure in data["failed"]) or "none"
    return (
        f"| {data['name']} | {data['env']} | {data['steps_done']:,} | {len(final)} "
        f"| {score(final)} | "
        f"{final.min():.{digits}f} to {final.max():.{digits}f} | {data['random']['return']:.1f} "
        f"| {failures} | {target} | {source} |"
    )


def write_page() -> None:
    """Replaces what follows the marker in docs/results.md."""
    paths = (path for path in sorted(HERE.glob("*.json")) if not path.name.startswith(("speed_", "brax_own_", "study_")))
    runs = [run for path in paths if "eval_returns" in (run := json.loads(path.read_text()))]  # labs have pages of their own
    lines = [
        "| config | environment | steps per seed | seeds | IQM [95%] | range over seeds | random | failed | target | published |",
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
            f"{run['wall_seconds']:.0f} s wall of which {run['compile_seconds']:.0f} s compiling, on "
            f"{counted(len(run['devices']), 'host device')} ({run['platform']}); "
            f"Python {v['python']}, jax {v['jax']}, {run['finished'][:10]}. "
            f"Per-seed data: `benchmarks/results/{run['name']}.json`."
        )
    draw(runs)
    said = "Greedy return against steps, a panel an environment: IQM over seeds, its 95% interval, and each seed as a thin line"
    lines += ["", "## Curves", "", f"![{said}]({CURVES.name})", "", f"{said}."]
    lines += brax_own() + speed()
    head = PAGE.read_text().split(MARKER)[0]
    PAGE.write_text(head + MARKER + "\n\n" + "\n".join(lines) + "\n")


def draw(runs: list[dict]) -> None:
    """The curves of all runs of two seeds or more, a panel an environment."""
    runs = [run for run in runs if len(run["lanes"]) > 1]
    places = sorted({run["env"] for run in runs})
    columns = 4
    rows = -(-len(places) // columns)
    figure, axes = page.figure(rows, columns, 3.2 * columns, 2.5 * rows)
    for axis, place in zip(axes, places, strict=False):
        for i, run in enumerate(run for run in runs if run["env"] == place):
            returns, steps = np.array(run["eval_returns"], float).T, np.array(run["eval_steps"])  # [evaluations, seeds]
            known = np.isfinite(returns).all(0)
            colour, _ = page.line_style(i)
            low, high = bootstrap_intervals(returns[:, known], 1000).T
            axis.plot(steps, returns, color=colour, lw=0.5, alpha=0.25)
            axis.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
            axis.plot(steps, [iqm(x) for x in returns[:, known]], color=colour, lw=1.6, label=run["name"])
        axis.set_title(place, loc="left", fontsize=9)
        axis.legend(fontsize=6.5, frameon=False)
    for axis in axes[len(places) :]:
        axis.set_visible(False)
    CURVES.write_bytes(page.png(figure, dpi=80))


def brax_own() -> list[str]:
    """The table of what benchmarks/brax_ppo.py measured, beside our runs of the same configs."""
    lines = []
    for path in sorted(HERE.glob("brax_own_*.json")):
        data, ours = json.loads(path.read_text()), HERE / f"{path.stem.removeprefix('brax_own_')}.json"
        seeds = data["seeds"].values()
        final = np.array([seed["eval_returns"][-1] for seed in seeds])
        steps = max(seed["eval_steps"][-1] for seed in seeds)
        versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
        own = "- | - | -"
        if ours.exists():
            run = json.loads(ours.read_text())
            own = f"{run['steps_done']:,} | {len(last_returns(run))} | {score(last_returns(run))}"
        lines.append(f"| {data['config']} | {own} | {steps:,} | {len(final)} | {score(final)} | {versions} |")
    if not lines:
        return []
    return [
        "",
        "## brax's own PPO",
        "",
        "brax's trainer at the settings of our configs; `benchmarks/brax_ppo.py` says what is not equal. IQM [95%] as above.",
        "",
        "| config | rljax: steps per seed | seeds | return | brax: steps per seed | seeds | return | versions |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def speed() -> list[str]:
    """The tables of benchmarks/speed/compare.py."""
    lines = []
    for algo, text in SPEED_OF.items():
        path = HERE / f"speed_{algo}.json"
        if path.exists():
            lines += ["", f"### {'Offline' if algo == 'offline' else algo.upper()}", "", text]
            for name, case in json.loads(path.read_text()).items():
                lines += speed_case(name, case)
    return ["", "## Speed", "", SPEED, *lines, *speed_of_grpo(), *cost_of_seeds()] if lines else []


def speed_of_grpo() -> list[str]:
    """The table of benchmarks/speed/grpo.py."""
    path = HERE / "speed_grpo.json"
    if not path.exists():
        return []
    lines = [
        "",
        "### GRPO of a language model",
        "",
        "One step, sampling and update, of one Llama: equal models, prompts, groups of 8 and completion lengths, float32 unless",
        "the name says otherwise, one gradient step a batch, no reference (`benchmarks/speed/grpo.py`). Least and median time of",
        "a step over the rounds; the ratio is that of the least. Both sides have two threads. At 256 rows and a completion",
        "of 32, rljax takes its gradient in four micro-batches. Targets: 32 rows 4 times TRL, 256 rows of the small model 2.5,",
        "of 4x128 1.5, 135M in bfloat16 1.8.",
        "",
        "| case | contender | least | median | times rljax | compile | versions |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in json.loads(path.read_text()).items():
        for contender, data in case["contenders"].items():
            s, versions = data["summary"], ", ".join(f"{package} {version}" for package, version in data["versions"].items())
            lines.append(
                f"| {name} | {contender} | {1e3 * s['least']:.1f} ms | {1e3 * s['median']:.1f} ms | {s['ratio']:.2f} "
                f"| {data['compile_seconds']:.1f} s | {versions} |"
            )
    return lines


def cost_of_seeds() -> list[str]:
    """The table of benchmarks/speed/seeds.py."""
    path = HERE / "speed_seeds.json"
    if not path.exists():
        return []
    lines = [
        "",
        "### Many seeds",
        "",
        "Time of 5, 8, 10 and 32 seeds over that of one, with the program of `rljax run`, evaluation and compilation apart",
        "(`benchmarks/speed/seeds.py`). One seed keeps about one core busy; more are spread over the host devices, so that five",
        "of them take as long as six on two. Target of grpo_addition: five below 4. The offline agents were measured beside",
        "other work that left them less than one core however many seeds there were: ten cost what their arithmetic does.",
        "",
        "| config | agent | steps/s, one seed | 5 seeds | 8 seeds | 10 seeds | 32 seeds | steps/s, most seeds | devices |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, data in json.loads(path.read_text()).items():
        cost, rate = data["cost_over_one_seed"], data["steps_per_second"]
        costs = " | ".join(f"{cost[count]:.1f}" if count in cost else "-" for count in ("5", "8", "10", "32"))
        most = rate[max(rate, key=int)]
        lines.append(f"| {name} | {data['agent']} | {rate['1']:,.0f} | {costs} | {most:,.0f} | {data['devices']} |")
    return lines


def counted(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number:,} {what}s"


def speed_case(name: str, case: dict) -> list[str]:
    """A table; ratios are taken within rounds."""
    s, machine, contenders = case["settings"], case["machine"], case["contenders"]
    base = np.array([r["steps"] / r["seconds"] for r in contenders["rljax"]["rounds"]])
    is_offline = "data_size" in s
    what = f"{s['data_size']:,} recorded steps" if is_offline else counted(s["num_envs"], "environment")
    size = f" x {s['num_steps']} steps"
    if "batch_size" in s:
        size = f", layers {'-'.join(map(str, s['hidden']))}, batches of {s['batch_size']}"
    lines = [
        "",
        f"**{name}**: {s['env']}, {counted(s['seeds'], 'seed')}, {what}{size}; "
        f"{counted(s['rounds'], 'round')} on {counted(s.get('cores') or machine['cpus'], 'core')}, {case['date'][:10]}.",
        "",
        f"| | steps/s | range | rljax / it | compile | {'Q, TD error' if is_offline else 'mean return'} | versions |",
        "|---|---|---|---|---|---|---|",
    ]
    outcomes = {"q": ".2f", "td_error": ".3g"} if is_offline else {"mean_return": ".0f"}
    digits = 1 if base.max() < 100 else 0
    for contender, data in contenders.items():
        rates = np.array([r["steps"] / r["seconds"] for r in data["rounds"]])
        ratio = np.median(base / rates)
        versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
        outcome = ", ".join(format(np.mean([r[key] for r in data["rounds"]]), form) for key, form in outcomes.items())
        lines.append(
            f"| {contender} | {np.median(rates):,.{digits}f} | {rates.min():,.{digits}f} to {rates.max():,.{digits}f} "
            f"| {ratio:.2f} | {data['compile_seconds']:.1f} s | {outcome} | {versions} |"
        )
    return lines


if __name__ == "__main__":
    for directory in sys.argv[1:]:
        collect(directory)
    write_page()
