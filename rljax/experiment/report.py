"""What a run directory says to a reader: its summary, its learning curve, and one self-contained HTML page.

Everything here is read back from the files of the run (`config.toml`, `run.json`, `metrics.jsonl`, `samples/`), so a
report can be made of a run that is still going, was killed, or was made on another machine. The unit of evidence is
the seed: every mean, interval and range is over seeds, each of which is already a mean over evaluation episodes.
"""

import functools
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.experiment import page
from rljax.experiment.health import sentence
from rljax.experiment.pictures import read_about
from rljax.experiment.statistics import bootstrap_interval, bootstrap_intervals, iqm, normalized_score
from rljax.files import write_whole

EVALUATION, TRAINING = "eval/return", "episode/return"
REGRET = "regret/cumulative"  # of a bandit, over all its decisions so far
ENOUGH_SEEDS = 5
TRANSCRIPT_LINES = 12  # of each of three steps: an early, a middle and the last
BAND_RESAMPLES = 2_000
# What must be read together, in the order in which a reader does; a name that ends in / stands for all that begin with it.
HEALTH = (TRAINING, "episode/return_std", "reward/", "kl", "kl_reference/", "kl_coef", "entropy", "episode/length")
HEALTH += ("episode/truncated", "unfinished", "flat_groups", "invalid", "ratio_error", "clip_fraction", "grad_norm")
HEALTH += ("explained_variance",)
RESULTS = ["setting", "seeds", "IQM", "95% interval", "mean", "range"]
DETAILS = ("return_std", "length", "episodes", "unfinished")  # of an evaluation, beside its return
CITATION_TITLE = "rljax: reinforcement learning research in JAX"


# Reading


@dataclass(frozen=True)
class Run:
    """The files of one run: `config` is the text of config.toml, `info` is run.json, `rows` are metrics.jsonl."""

    path: Path
    config: str
    info: dict[str, Any]
    rows: list[dict[str, Any]]


def read_run(path: str | Path) -> Run:
    """Read a run directory.

    A last line of metrics.jsonl that a kill cut short is left out. Raises FileNotFoundError where a file is missing
    and ValueError where one cannot be read; each names the file, and the line.
    """
    path = Path(path)
    for name in ("config.toml", "run.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name}: no such file; is {path} a run directory?")
    try:
        info = json.loads((path / "run.json").read_bytes())
        if missing := [key for key in ("name", "config_hash", "env", "agent", "lanes") if not info.get(key)]:
            raise ValueError(f"no {', '.join(missing)}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path / 'run.json'}: not a run's description ({error})") from None
    rows = []
    *lines, last = (path / "metrics.jsonl").read_bytes().split(b"\n")
    for number, line in enumerate([*lines, last] if last else lines, 1):
        try:
            row = json.loads(line)
            if not {"step", "lane"} <= row.keys():
                raise ValueError
            rows.append(row)
        except (ValueError, AttributeError):
            if number <= len(lines):  # it has its newline, so was written whole
                raise ValueError(f"{path / 'metrics.jsonl'}, line {number}: not a row of metrics") from None
    return Run(path, (path / "config.toml").read_text(encoding="utf-8"), info, rows)


def _series(run: Run, key: str) -> dict[int, np.ndarray]:
    """{lane: [points, 2] of (step, value)} in the order of steps; values that are null or not finite are left out."""
    points: dict[int, list[tuple[float, float]]] = {}
    for row in run.rows:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            points.setdefault(row["lane"], []).append((row["step"], value))
    return {lane: np.array(sorted(pairs), np.float64) for lane, pairs in points.items()}


# The summary


def _settings(info: dict[str, Any]) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """(label, swept values, lanes) of each combination of swept values; a lane is one seed of it."""
    swept = list(info.get("sweep") or {})
    groups: dict[str, list[dict[str, Any]]] = {}
    for lane in info["lanes"]:
        groups.setdefault(json.dumps([lane.get(key) for key in swept]), []).append(lane)
    settings = []
    for lanes in groups.values():
        values = {key: lanes[0].get(key) for key in swept}
        settings.append((setting_label(values) or info["agent"], values, lanes))
    return settings


def setting_label(values: dict[str, Any]) -> str:
    short = [key.rpartition(".")[2] for key in values]
    names = short if len(set(short)) == len(short) else values
    return ", ".join(f"{name}={value}" for name, value in zip(names, values.values(), strict=True))


def _final_rows(run: Run, metric: str) -> dict[int, dict[str, Any]]:
    """{lane: the row that its final score is read from}.

    An evaluation's row counts even where its return is null: that is a seed that went wrong, and must be named. A
    training return is null whenever no episode happened to finish, so the last that is not is used. That of a lane that
    was dropped on the way is its last.
    """
    rows: dict[int, dict[int, dict[str, Any]]] = {}
    for row in run.rows:
        if metric in row and (metric == EVALUATION or row[metric] is not None):
            rows.setdefault(row["lane"], {})[row["step"]] = row
    if metric == TRAINING:
        return {lane: of[max(of)] for lane, of in rows.items()}
    gone = {entry["lane"] for entry in run.info.get("failed") or []}
    dropped = {lane: entry["step"] for entry in run.info.get("dropped") or [] for lane in entry["lanes"]}
    # Of a run killed between two lanes' rows, the last step that every seed has reached.
    step = min((max(of) for lane, of in rows.items() if lane not in gone | dropped.keys()), default=None)
    return {lane: of[at] for lane, of in rows.items() if (at := dropped.get(lane, step)) in of}


def _spread(seeds: int) -> str:
    if seeds >= ENOUGH_SEEDS:
        return "established"
    return f"spread not established: {seeds} seed{'' if seeds == 1 else 's'}, five or more are needed"


def _summarize_lanes(lanes: list[dict], metric: str, finals: dict[int, dict], failed: dict[int, dict]) -> dict:
    kept, lost = [], []
    for lane in lanes:
        name = {"seed": lane["seed"], "lane": lane["lane"]}
        row = finals.get(lane["lane"], {})
        score = row.get(metric)
        if entry := failed.get(lane["lane"]):
            lost.append({**name, "step": entry.get("step"), "reason": entry.get("reason") or "failed"})
        elif score is None or not math.isfinite(score):
            reason = f"{metric} is not finite" if row else f"no {metric} recorded"
            lost.append({**name, "step": row.get("step"), "reason": reason})
        else:
            of = {key: row.get(f"eval/{key}") for key in DETAILS} if metric == EVALUATION else {}
            kept.append({**name, "step": row["step"], "return": float(score), **of})
    scores = np.array([seed["return"] for seed in kept])
    low, high = bootstrap_interval(scores) if len(kept) > 1 else (None, None)
    centre = {"iqm": iqm, "mean": np.mean, "min": np.min, "max": np.max}
    numbers = {name: float(function(scores)) if kept else None for name, function in centre.items()}
    return {**numbers, "low": low, "high": high, "spread": _spread(len(kept)), "seeds": kept, "failed": lost}


def _regret(run: Run, lanes: list[int]) -> dict:
    """`regret`, of a bandit: IQM and 95% bootstrap interval over seeds of what all decisions up to the last row have cost."""
    last = {row["lane"]: row[REGRET] for row in run.rows if row.get(REGRET) is not None}
    totals = np.array([last[lane] for lane in lanes if lane in last])
    if not totals.size:
        return {}
    low, high = bootstrap_interval(totals) if len(totals) > 1 else (None, None)
    return {"regret": {"iqm": float(iqm(totals)), "low": low, "high": high}}


def summarize(run: Run | str | Path) -> dict[str, Any]:
    """The summary of a run, or of what is in its directory, ready for JSON: what is not defined is None, never NaN.

    Each of its `settings` (one a combination of swept values) has `iqm`, `low`, `high` (95% bootstrap interval over
    seeds; None with one seed), `mean`, `min`, `max`, `spread`, the `seeds` that count, and the `failed` ones by name; and
    `dropped`, the step after which halving dropped it, or None: its scores are of that step, and it is not the best. Those of a
    bandit whose environment knows the best arm have `regret` too, with `iqm`, `low` and `high`.
    """
    run = run if isinstance(run, Run) else read_run(run)
    info = run.info
    metric = EVALUATION if any(EVALUATION in row for row in run.rows) else TRAINING
    finals, failed = _final_rows(run, metric), {entry["lane"]: entry for entry in info.get("failed") or []}
    dropped = {lane: entry["step"] for entry in info.get("dropped") or [] for lane in entry["lanes"]}
    settings = []
    for label, values, lanes in _settings(info):
        scores = _summarize_lanes(lanes, metric, finals, failed)
        scores |= _regret(run, [seed["lane"] for seed in scores["seeds"]])
        settings.append({"label": label, "values": values, "dropped": dropped.get(lanes[0]["lane"]), **scores})
    scored = [setting for setting in settings if setting["iqm"] is not None and setting["dropped"] is None]
    kept = ("steps_asked", "steps_done", "wall_seconds", "compile_seconds", "steps_per_second", "command", "random", "data")
    return {
        **{key: info.get(key) for key in ("name", "config_hash", "env", "agent", "status")},
        "metric": metric,
        "note": None if metric == EVALUATION else "no evaluation rows: each seed's last training return stands in",
        "settings": settings,
        "best": max(scored, key=lambda setting: setting["iqm"])["label"] if scored and len(settings) > 1 else None,
        "warnings": info.get("warnings"),
        "spread": _spread(min((len(setting["seeds"]) for setting in settings if setting["dropped"] is None), default=0)),
        **{key: info.get(key) for key in kept},
    }


def write_summary(path: str | Path) -> dict[str, Any]:
    """Write `summary.json` into the run directory and return what it holds."""
    summary = summarize(path)
    write_whole(Path(path) / "summary.json", (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    return summary


# Words and numbers


def _count(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {int(seconds % 60):02d} s"


def result_rows(settings: Sequence[dict]) -> list[list[str]]:
    """A row a setting: label, seeds, IQM, interval, mean, range."""
    number = page.number_format(setting[key] for setting in settings for key in ("min", "max"))
    rows = []
    for setting in settings:
        used, asked = len(setting["seeds"]), len(setting["seeds"]) + len(setting["failed"])
        interval = "n/a" if setting["low"] is None else f"[{number(setting['low'])}, {number(setting['high'])}]"
        span = f"{number(setting['min'])} to {number(setting['max'])}" if used else "n/a"
        seeds = str(used) if used == asked else f"{used} of {asked}"
        until = f" (dropped at {_count(setting['dropped'])})" if setting.get("dropped") is not None else ""
        rows.append([setting["label"] + until, seeds, number(setting["iqm"]), interval, number(setting["mean"]), span])
    return rows


def random_line(random: dict | None, settings: Sequence[dict]) -> str:
    if not random or random.get("return") is None:
        return "not measured"
    number = page.number_format([random["return"], *(setting[key] for setting in settings for key in ("min", "max"))])
    spread = "" if random.get("std") is None else f" \N{PLUS-MINUS SIGN} {number(random['std'])}"
    return f"{number(random['return'])}{spread} over {_count(random.get('episodes'))} episodes"


def _normalized(data: dict, settings: Sequence[dict]) -> list[tuple[str, str]]:
    """Scores on the scale of a data set's anchors, or why there are none; nothing where a run had no data set."""
    if not data:
        return []
    try:
        scale = functools.partial(normalized_score, about=data, name="the data set")
        parts = []
        for setting in settings:
            where = f"{setting['label']}: " if len(settings) > 1 else ""
            if setting["iqm"] is not None:
                bounds = "" if setting["low"] is None else f" [{scale(setting['low']):.1f}, {scale(setting['high']):.1f}]"
                parts.append(f"{where}{scale(setting['iqm']):.1f}{bounds}")
        return [("normalised", f"{'; '.join(parts)}, where 0 is random and 100 the expert of the data")] if parts else []
    except ValueError as error:
        return [("normalised", f"not stated: {error}")]


def _facts(summary: dict) -> list[tuple[str, str]]:
    """(name, sentence) pairs that belong under the table of results, on the terminal and on the page."""
    settings = summary["settings"]
    seeds = [seed for setting in settings for seed in setting["seeds"]]
    at = f" at step {_count(max(seed['step'] for seed in seeds))}" if seeds else ""
    facts = [("score", f"{summary['metric']}{at}; IQM and 95% bootstrap interval over seeds")]
    if summary["best"] is not None:
        text = f"{summary['best']}: highest IQM of {len(settings)} settings, picked on these same seeds, so optimistic"
        facts.append(("best", text))
    if out := [setting for setting in settings if setting["dropped"] is not None]:
        steps = sorted({setting["dropped"] for setting in out})
        text = f"{len(out)} setting{'s' * (len(out) > 1)}, at step{'s' * (len(steps) > 1)} {', '.join(map(_count, steps))}"
        facts.append(("dropped", f"{text}, and scored there; not to be set beside the others"))
    facts += [("note", summary["note"])] if summary["note"] else []
    facts.append(("random", random_line(summary["random"], settings)))
    facts += _normalized(summary["data"] or {}, settings)
    number = page.number_format(setting["regret"][key] for setting in settings if "regret" in setting for key in ("iqm", "high"))
    for setting in settings:
        if of := setting.get("regret"):
            where = f"{setting['label']}: " if len(settings) > 1 else ""
            bounds = "" if of["low"] is None else f" [{number(of['low'])}, {number(of['high'])}]"
            facts.append(("regret", f"{where}{number(of['iqm'])}{bounds}, cumulative; less is better"))
    for setting in settings:
        where = f" ({setting['label']})" if len(settings) > 1 else ""
        for lost in setting["failed"]:
            at = "" if lost["step"] is None else f" at step {_count(lost['step'])}"
            facts.append(("failed", f"seed {lost['seed']}{where}{at}: {lost['reason']}"))
    facts += [] if any(setting["failed"] for setting in settings) else [("failed", "none")]
    if unfinished := sum(seed.get("unfinished") or 0 for seed in seeds):
        episodes = sum(seed.get("episodes") or 0 for seed in seeds)
        facts.append(("unfinished", f"{_count(unfinished)} of {_count(episodes)} evaluation episodes did not end"))
    if summary["spread"] != "established":
        facts.append(("spread", summary["spread"].removeprefix("spread ")))
    return facts


def _warnings(summary: dict) -> list[tuple[str, str]]:
    lanes = sum(len(setting["seeds"]) + len(setting["failed"]) for setting in summary["settings"])
    return [("warning", sentence(warning, lanes)) for warning in summary["warnings"] or []]


def _commands(summary: dict, setting: dict) -> list[tuple[str, str]]:
    """How to run one setting of a sweep by itself, on the same seeds and on as many others."""
    run = (summary["command"] or "").replace("rljax reproduce", "rljax run", 1)
    words = [word for key, value in setting["values"].items() for word in (f"--{key}", str(value))]
    seeds = sorted(entry["seed"] for entry in setting["seeds"] + setting["failed"])
    alone = " ".join([run, shlex.join(words)]) if words else ""
    fresh = " ".join([alone or run, "--seeds", *(str(seeds[-1] + 1 + i) for i in range(len(seeds)))])
    return [("alone", alone)] * bool(alone) + [("new seeds", fresh)]


def _costs(summary: dict) -> list[tuple[str, str]]:
    wall, compiling = _duration(summary["wall_seconds"]), _duration(summary["compile_seconds"])
    return [
        ("steps", f"{_count(summary['steps_asked'])} asked, {_count(summary['steps_done'])} done, per seed"),
        ("time", f"{wall} wall, of which {compiling} compiling"),
        ("speed", f"{_count(summary['steps_per_second'])} steps/s over all lanes"),
        ("reproduce", summary["command"] or "n/a"),
    ]


def summary_text(summary: dict[str, Any]) -> str:
    """The summary as the terminal prints it at the end of a run."""
    table = [RESULTS, *result_rows(summary["settings"])]
    lines = [f"{_title(summary)}   {_run_id(summary)}   {summary['status']}", ""]
    lines += [f"{'*' if row[0] == summary['best'] else ' '} {line}" for row, line in zip(table, page.columns(table), strict=True)]
    best = [_commands(summary, setting) for setting in summary["settings"] if setting["label"] == summary["best"]]
    pairs = [*_facts(summary), *_warnings(summary), *_costs(summary), *(pair for pairs in best for pair in pairs)]
    return "\n".join([*lines, "", *(f"  {name:<10}   {text}" for name, text in pairs)])


def sweep_text(members: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """One table over all programs of a sweep: for each, the values in which it differs from the others, and its summary."""
    settings = []
    for fixed, summary in members:
        for setting in summary["settings"]:
            values = dict(sorted({**fixed, **setting["values"]}.items()))
            settings.append({**setting, "label": setting_label(values), "again": _commands(summary, setting)})
    table = [RESULTS, *result_rows(settings)]
    scored = [setting for setting in settings if setting["iqm"] is not None and setting["dropped"] is None]
    best = max(scored, key=lambda setting: setting["iqm"]) if scored else None
    lines = [f"all {len(settings)} settings of {len(members)} programs", ""]
    marks = [" ", *("*" if setting is best else " " for setting in settings)]
    lines += [f"{mark} {line}" for mark, line in zip(marks, page.columns(table), strict=True)]
    if best is None:
        return "\n".join(lines)
    _, seeds, centre, interval, *_ = table[1 + settings.index(best)]
    text = f"{best['label']}: IQM {centre}, 95% interval {interval}, over {seeds} seeds"
    facts = [("best", text), ("", f"the highest IQM of {len(settings)} settings, picked on these same seeds, so optimistic")]
    return "\n".join([*lines, "", *(f"  {name:<10}   {text}" for name, text in [*facts, *best["again"]])])


def _title(info: dict) -> str:
    return f"{info['agent']} on {info['env']}"


def _run_id(info: dict) -> str:
    return f"{info.get('name')}/{info.get('config_hash')}"


# Figures


class Curve(NamedTuple):
    """One setting in a plot: [points, 2] of (step, value) for each seed, failed seeds apart, and a number for its style."""

    label: str
    seeds: list[np.ndarray]
    failed: list[np.ndarray]
    style: int


def curves_of(run: Run, settings: Sequence[dict], key: str) -> list[Curve]:
    """A curve for each of a summary's settings, styled by its `style` or its place; none where no seed has this metric."""
    series = _series(run, key)
    curves = []
    for i, setting in enumerate(settings):
        kept, lost = ([series[seed["lane"]] for seed in setting[part] if seed["lane"] in series] for part in ("seeds", "failed"))
        curves.append(Curve(setting["label"], kept, lost, setting.get("style", i)))
    return curves if any(curve.seeds or curve.failed for curve in curves) else []


def _bands(scores: list[np.ndarray]) -> np.ndarray:
    """[points, 2]: the 95% bootstrap interval over seeds at each point, whose seeds may be fewer than those of others."""
    bands = np.full((len(scores), 2), np.nan)
    counts = np.array([len(row) for row in scores])
    for count in np.unique(counts[counts > 1]):
        here = np.flatnonzero(counts == count)
        bands[here] = bootstrap_intervals(np.stack([scores[i] for i in here]), resamples=BAND_RESAMPLES)
    return bands


def _aggregate(seeds: list[np.ndarray], points: int = 100) -> tuple[np.ndarray, list[np.ndarray]]:
    """Up to `points` of the steps that any seed has, and at each of them the seeds' values.

    Seeds are evaluated at the same steps. Training returns come when episodes end, so a seed without one at a step
    is interpolated between its neighbours; before its first and after its last it is not there.
    """
    steps = np.unique(np.concatenate([seed[:, 0] for seed in seeds]))
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, points).round().astype(int))]
    table = np.stack([np.interp(steps, *seed.T, left=np.nan, right=np.nan) for seed in seeds], axis=1)
    return steps, [row[~np.isnan(row)] for row in table]


def _thin(curves: Sequence[Curve]) -> bool:
    """Whether to draw single seeds too: not in a crowd, nor where a seed is the whole curve."""
    return len(curves) <= 4 and any(len(curve.seeds + curve.failed) > 1 for curve in curves)


def _draw(ax: Any, curves: Sequence[Curve], health: bool = False) -> None:
    """Draw curves. The scale of health is not set by failed seeds, whose last values may be huge."""
    styles = [page.line_style(curve.style) for curve in curves]
    for curve, (colour, dash) in zip(curves, styles, strict=True):
        if not curve.seeds:
            continue
        for seed in curve.seeds if _thin(curves) else []:
            ax.plot(*seed.T, color=colour, linewidth=0.6, alpha=0.35)
        steps, scores = _aggregate(curve.seeds)
        ax.fill_between(steps, *_bands(scores).T, color=colour, alpha=0.18, linewidth=0)
        width = 1.2 if health else 1.8
        ax.plot(steps, [iqm(row) for row in scores], color=colour, linewidth=width, linestyle=dash, label=curve.label)
    limits = ax.get_ylim()
    for curve, (colour, _) in zip(curves, styles, strict=True):
        for seed in curve.failed if _thin(curves) or not health else []:
            ax.plot(*seed.T, color=colour, linewidth=0.9, linestyle=":", marker="x", markersize=4, markevery=[-1])
    if health and any(curve.seeds for curve in curves):
        ax.set_ylim(limits)
    ax.set_xlim(left=0)


def curve_caption(curves: Sequence[Curve]) -> str:
    counts = [len(curve.seeds) for curve in curves]
    few, many = min(counts), max(counts)
    text = f"IQM over {few if few == many else f'{few} to {many}'} seed{'' if many == 1 else 's'}"
    text += ", 95% interval" if many > 1 else ""
    text += "; thin: single seeds" if _thin(curves) else ""
    text += "; \N{MULTIPLICATION SIGN}: a failed seed" if any(curve.failed for curve in curves) else ""
    return text + ("; spread not established" if few < ENOUGH_SEEDS else "")


def learning_curve(
    panels: Sequence[tuple[str, Sequence[Curve]]], random: dict | None, title: str = "", width: float = 10.0
) -> bytes:
    """A panel for each (metric, curves) pair, side by side on one scale, with the random policy's return dashed."""
    figure, axes = page.figure(1, len(panels), width, 4.0, sharey=True)
    grey = {"fontsize": 7.5, "color": "#555555", "textcoords": "offset points"}
    for ax, (metric, curves) in zip(axes, panels, strict=True):
        _draw(ax, curves)
        if random and random.get("return") is not None:
            ax.axhline(random["return"], color="#555555", linewidth=1.0, linestyle=(0, (5, 3)))
            place = {"xycoords": ax.get_yaxis_transform(), "ha": "right"}
            ax.annotate("random policy", (1.0, random["return"]), (-2, 3), **place, **grey)
        ax.set_xlabel("environment steps per seed", fontsize=9)
        ax.set_ylabel(f"{'evaluation' if metric == EVALUATION else 'training'} return per episode", fontsize=9)
    if title:
        axes[0].set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
        axes[0].annotate(curve_caption(panels[0][1]), (0, 1), (0, 6), xycoords="axes fraction", **grey).set_in_layout(False)
    page.legend(figure, axes[0])
    return page.png(figure)


def write_curve(path: str | Path) -> Path | None:
    """Write `curve.png`, return against environment steps, into the run directory; None where there is no return."""
    run = read_run(path)
    summary = summarize(run)
    curves = curves_of(run, summary["settings"], summary["metric"])
    if not curves:
        return None
    image = learning_curve([(summary["metric"], curves)], summary["random"], _title(summary), width=6.0)
    return write_whole(run.path / "curve.png", image)


def _grids(run: Run, summary: dict) -> list[tuple[str, list[Curve], bytes]]:
    """(heading, curves of the first panel, figure) of what belongs to health and of the run's other metrics, a panel each."""
    known = {"step", "lane", "seed", "finite", "episode/count", *(run.info.get("sweep") or {})}
    logged = sorted({key for row in run.rows for key in row if key not in known and not key.startswith("eval/")})
    keys = [key for name in HEALTH for key in logged if key == name or (name[-1] == "/" and key.startswith(name))]
    figures = []
    for heading, of in (("Health", keys), ("Other metrics", [key for key in logged if key not in keys])):
        panels = [(key, curves) for key in of if (curves := curves_of(run, summary["settings"], key))]
        if panels:
            figures.append((heading, panels[0][1], _grid(panels)))
    return figures


def _grid(panels: Sequence[tuple[str, Sequence[Curve]]]) -> bytes:
    rows = -(-len(panels) // 3)
    figure, axes = page.figure(rows, 3, 10.0, 2.1 * rows + 0.4)
    for ax, (key, curves) in zip(axes, panels, strict=False):
        _draw(ax, curves, health=True)
        ax.set_title(key, loc="left", fontsize=9)
    for ax in axes[len(panels) :]:
        ax.remove()
    page.legend(figure, axes[0])
    return page.png(figure)


# The page


def _best(summary: dict) -> dict:
    """The setting that stands for a run: the best, or the only one."""
    return next((of for of in summary["settings"] if of["label"] == summary["best"]), summary["settings"][0])


def _headline(summary: dict) -> str:
    setting = _best(summary)
    _, seeds, centre, interval, *_ = result_rows([setting])[0]
    interval = "" if interval == "n/a" else interval
    about = f"IQM{' [95% bootstrap interval]' if interval else ''} over {seeds} seed{'' if seeds == '1' else 's'}"
    about += f", {summary['best']}, the best of {len(summary['settings'])} settings" if summary["best"] else ""
    about += "" if setting["spread"] == "established" else f"; {setting['spread']}"
    about += f". Random policy: {random_line(summary['random'], [setting])}."
    return f"<p class=score>{centre} <small>{interval}</small></p><p class=about>{escape(about)}</p>"


def _seed_table(summary: dict) -> str:
    header = ["setting", "seed", "return", "std over episodes", "episode length", "episodes", "unfinished"]
    header = header if summary["metric"] == EVALUATION else header[:3]
    number = page.number_format(seed["return"] for setting in summary["settings"] for seed in setting["seeds"])
    rows = []
    for setting in summary["settings"]:
        for seed in setting["seeds"]:
            spread, length, *counts = (seed.get(key) for key in DETAILS)
            cells = [number(seed["return"]), number(spread), page.number_format([length])(length), *map(_count, counts)]
            rows.append([setting["label"], str(seed["seed"]), *cells][: len(header)])
        for lost in setting["failed"]:
            rows.append([setting["label"], str(lost["seed"]), "failed", *("" for _ in header[3:])])
    first = 0 if summary["best"] else 1
    table = page.table(header[first:], [row[first:] for row in rows])
    return f"<details><summary>{len(rows)} seeds</summary>{table}</details>" if len(rows) > 20 else table


def _samples(run: Run) -> str:
    parts = []
    for file in sorted((run.path / "samples").rglob("*"), key=lambda file: (file.stem[:5] != "step-", file)):
        name = str(file.relative_to(run.path / "samples"))
        if file.suffix == ".gif":
            parts.append(page.image(file.read_bytes(), _picture_caption(file) or name, "gif"))
        elif file.suffix == ".txt":
            text = escape(file.read_text(encoding="utf-8", errors="replace"))
            parts.append(f"<figcaption>{escape(name)}</figcaption><pre>{text}</pre>")
    files = sorted((run.path / "samples").glob("step-*.jsonl"))
    for file in [files[i] for i in sorted({0, len(files) // 2, len(files) - 1})] if files else []:
        head, *episodes = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
        lines = []
        for row in episodes[:TRANSCRIPT_LINES]:
            reward = "invalid" if row["reward"] is None else f"{row['reward']:.2f}"
            lines.append(f"seed {row['seed']:>3}  reward {reward:>7}  {row['prompt']!r} -> {row['completion']!r}")
        parts.append(f"<figcaption>step {head['step']:,}</figcaption><pre>{escape(chr(10).join(lines))}</pre>")
    return "".join(parts)


def _picture_caption(file: Path) -> str:
    """What a GIF shows; empty where it does not say so."""
    about = read_about(file)
    try:
        returns, lengths = about.pop("returns"), about.pop("lengths")
        unfinished = "" if all(about.pop("finished")) else ", unfinished"
        step, lane, seed = (about.pop(key) for key in ("step", "lane", "seed"))
        values = f", {setting_label(about)}" if about else ""
        score = f"return {', '.join(f'{value:.6g}' for value in returns)} in {', '.join(map(_count, lengths))} steps{unfinished}"
        return f"step {_count(step)}, seed {seed} (lane {lane}){values}: {score}"
    except (KeyError, TypeError):
        return ""


def _provenance(run: Run, summary: dict) -> str:
    info = run.info
    commit = f"{info.get('commit') or 'n/a'}{', with uncommitted changes' if info.get('dirty') else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in (info.get("versions") or {}).items())
    devices = ", ".join(map(str, info.get("devices") or []))
    pairs = [("command", shlex.join(map(str, info.get("argv") or []))), ("commit", commit), ("versions", versions)]
    pairs += [
        ("devices", devices),
        *((key, str(info.get(key) or "n/a")) for key in ("platform", "started", "finished")),
    ]
    return page.terms([*_costs(summary), *pairs])


def citation(info: dict) -> str:
    note = re.sub(r"([&%$#_{}])", r"\\\1", f"{_title(info)}, run {_run_id(info)}, commit {info.get('commit')}")
    version = (info.get("versions") or {}).get("rljax")
    fields = {"author": "{The rljax developers}", "title": "{" + CITATION_TITLE + "}", "year": "2026"}
    fields |= {"version": version} if version else {}
    lines = [f"  {name:<7} = {{{value}}}" for name, value in {**fields, "note": note}.items()]
    return "@software{rljax,\n" + ",\n".join(lines) + "\n}"


def _section(run: Run, summary: dict, heading: str) -> str:
    title, settings = _title(summary), summary["settings"]
    found = [(key, curves_of(run, settings, key)) for key in (EVALUATION, TRAINING)]
    panels = [(key, curves) for key, curves in found if curves]
    curve = page.image(learning_curve(panels, summary["random"]), curve_caption(panels[0][1])) if panels else ""
    grids = {
        name: page.image(grid, f"{curve_caption(curves)}; against environment steps")
        for name, curves, grid in _grids(run, summary)
    }
    warned = [] if summary["warnings"] is None else _warnings(summary) or [("warnings", "none")]
    parts = {
        "Results": page.table(RESULTS, result_rows(settings), summary["best"]) + page.terms(_facts(summary)),
        "Seeds": _seed_table(summary),
        "Health": (page.terms(warned) if warned else "") + grids.pop("Health", ""),
        **grids,
        "Samples": _samples(run),
        "Provenance": _provenance(run, summary),
        "Config": f"<pre>{escape(run.config)}</pre>",
        "Citation": f"<pre>{escape(citation(run.info))}</pre>",
    }
    head = f'<{heading} id="{escape(_run_id(summary))}">{escape(title)}</{heading}>'
    head += f"<p class=id>{escape(_run_id(summary))}, {escape(str(summary['status']))}</p>{_headline(summary)}{curve}"
    return head + "".join(f"<h3>{name}</h3>{part}" for name, part in parts.items() if part)


def side_by_side(members: Sequence[tuple[Run, dict, dict]], random: dict | None) -> str:
    """(run, its summary, one of its settings) for each member: their curves in one plot, and a table with a row for each."""
    members = [(run, summary, {"style": i, **setting}) for i, (run, summary, setting) in enumerate(members)]
    settings = [setting for _, _, setting in members]
    curves = [curve for run, of, setting in members for curve in curves_of(run, [setting], of["metric"])]
    metric = EVALUATION if any(of["metric"] == EVALUATION for _, of, _ in members) else TRAINING
    image = page.image(learning_curve([(metric, curves)], random), curve_caption(curves)) if curves else ""
    costs = [[_count(of["steps_done"]), _duration(of["wall_seconds"])] for _, of, _ in members]
    rows = [row + cost for row, cost in zip(result_rows(settings), costs, strict=True)]
    table = page.table([*RESULTS, "steps", "wall time of the run"], rows)
    return f"{image}{table}{page.terms([('random', random_line(random, settings))])}"


def _comparison(runs: Sequence[Run], summaries: Sequence[dict]) -> str:
    """For each environment, the runs by their best settings, side by side."""
    names = [summary["name"] for summary in summaries]
    links = [f'<a href="#{escape(_run_id(summary))}">{escape(_run_id(summary))}</a>' for summary in summaries]
    parts = [f"<h1>Comparison of {len(runs)} runs</h1><p class=id>{', '.join(links)}</p>"]
    for env in dict.fromkeys(summary["env"] for summary in summaries):
        members = []
        for run, summary in zip(runs, summaries, strict=True):
            label = summary["name"] if names.count(summary["name"]) == 1 else _run_id(summary)
            label += f" ({summary['best']}, best of {len(summary['settings'])})" if summary["best"] else ""
            label += "" if summary["metric"] == EVALUATION else " (training return)"
            members += [(run, summary, {**_best(summary), "label": label})] if summary["env"] == env else []
        random = next((summary["random"] for _, summary, _ in members if summary["random"]), None)
        parts.append(f"<h3>{escape(env)}</h3>{side_by_side(members, random)}")
    return "".join(parts)


def write_report(paths: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one HTML page, which loads nothing from elsewhere, about one run or several, and return its path.

    Several runs are first compared: one plot and one table an environment, each run by its best setting. `out` is
    `report.html` in the run directory, or in the working directory where there are several. Raises as `read_run`.
    """
    runs = [read_run(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not runs:
        raise ValueError("a report needs a run directory or more")
    summaries = [summarize(run) for run in runs]
    several = len(runs) > 1
    sections = [_section(run, of, "h2" if several else "h1") for run, of in zip(runs, summaries, strict=True)]
    title = f"Comparison of {len(runs)} runs" if several else _title(summaries[0])
    body = "\n".join([_comparison(runs, summaries), *sections] if several else sections)
    default = Path("report.html") if several else runs[0].path / "report.html"
    return write_whole(default if out is None else Path(out), page.document(title, body))
