"""Which of several contenders scores higher, on one task or several, and what that does not show.

A *task* is an environment with its parameters. A *contender* is an algorithm with the settings in which the compared runs differ:
those in which two of its entries on one task do, so that what was tuned for each task does not make others of them. Everything is
read from the files of finished runs. Statistics are those of Agarwal et al. (2021), arXiv:2108.13264.
"""

import hashlib
import itertools
import json
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rljax.experiment import page, report
from rljax.experiment.statistics import (
    bootstrap_interval,
    improvement_interval,
    iqm,
    normalized_score,
    performance_profile,
    probability_of_improvement,
    profile_band,
)
from rljax.files import write_whole

ASIDE = ("env", "seeds", "name", "out", "checkpoint_seconds", "shard", "sweep", "data", "data_digest")
PROTOCOL = ("evals", "eval_episodes", "eval_max_steps", "eval_seed")
SOURCES = ("start_from", "reward_from")
# Parameters that only change what is learned from, with how the names of their environments begin: an evaluation leaves them out
# (`rljax.envs.wrappers.as_evaluated`), so they are settings, and no part of the task.
FOR_LEARNING = {"reward_scale": "", "proxy": "tokens/", "approach_bonus": "GoalGrid", "potential": "GoalGrid"}
LABEL_SETTINGS = 4  # that a label shows in any case
FEW = 6  # pairs that are named in a sentence
PAIRS = ["X > Y", "seeds", "P(X > Y)", "95% interval", "reading"]


@dataclass(frozen=True)
class Entry:
    """One contender on one task: a setting of a run.

    Attributes:
      task, contender: their labels.
      run, summary, setting: the run, its `report.summarize`, and the setting of that.
      place: the environment and its parameters.
      values: all other settings, by their dotted keys.
      protocol: how it was evaluated.
    """

    task: str
    contender: str
    run: report.Run
    summary: dict[str, Any]
    setting: dict[str, Any]
    place: dict[str, Any]
    values: dict[str, Any]
    protocol: dict[str, Any]

    @property
    def scores(self) -> np.ndarray:
        """[seeds], the final greedy return of each that has not failed."""
        return np.array([seed["return"] for seed in self.setting["seeds"]])

    @property
    def random(self) -> dict[str, Any] | None:
        """The random policy's return, which was measured in the first environment of a run that sweeps its parameters."""
        first = self.summary["settings"][0]["values"]
        is_first = all(self.place[key] == value for key, value in first.items() if key in self.place)
        return self.summary["random"] if is_first else None


@dataclass(frozen=True)
class Pair:
    """P(X > Y) of two contenders, on one task or averaged over `tasks`.

    `low` and `high` are None where a contender has a single seed on one of them, and so is `probability` where it has none.
    `seeds` are the fewest of X and the fewest of Y on any of them.
    """

    x: str
    y: str
    tasks: list[str]
    seeds: tuple[int, int]
    probability: float | None
    low: float | None
    high: float | None

    @property
    def reading(self) -> str:
        """What it shows, in words."""
        if min(self.seeds) < report.ENOUGH_SEEDS or self.low is None or self.high is None:
            return "not established"
        if self.low <= 0.5 <= self.high:
            return "no difference shown"
        return "X higher" if self.low > 0.5 else "Y higher"


@dataclass(frozen=True)
class Profile:
    """Run-score distributions: of each contender the share of its runs with a score above each threshold, and its band.

    `scores` are of `unit`, one [seeds] array a task; `thresholds` [T] are all scores there are; `shares` [T]; `bands` [T, 2].
    """

    unit: str
    scores: dict[str, list[np.ndarray]]
    thresholds: np.ndarray
    shares: dict[str, np.ndarray]
    bands: dict[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `pairs` are those on each task, then those averaged over tasks; `notes` are whole sentences."""

    entries: list[Entry]
    pairs: list[Pair]
    profile: Profile | None
    notes: list[str]

    @property
    def tasks(self) -> list[str]:
        """Their labels, in the order of the runs."""
        return list(dict.fromkeys(entry.task for entry in self.entries))

    @property
    def contenders(self) -> list[str]:
        """Their labels, in the order of the runs."""
        return list(dict.fromkeys(entry.contender for entry in self.entries))

    def text(self) -> str:
        """As the terminal prints it."""
        lines = []
        for task in self.tasks:
            here = [entry for entry in self.entries if entry.task == task]
            rows = report.result_rows([entry.setting for entry in here])
            steps = [f"{entry.summary['steps_done'] or 0:,}" for entry in here]
            table = [["contender", *report.RESULTS[1:], "steps"], *([*row, n] for row, n in zip(rows, steps, strict=True))]
            lines += [task, "", *_indented(page.columns(table)), ""]
            lines += [f"  random   {report.random_line(_random(here), [entry.setting for entry in here])}", ""]
            lines += _pair_lines([pair for pair in self.pairs if pair.tasks == [task]])
        if over := [pair for pair in self.pairs if len(pair.tasks) > 1]:
            lines += ["averaged over tasks", "", *_pair_lines(over)]
        if totals := _totals(self.profile):
            lines += [f"over tasks, {self.profile.unit if self.profile else ''}", "", *_indented(page.columns(totals)), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])

    def write(self, out: str | Path) -> Path:
        """Write it as one HTML page, which loads nothing from elsewhere, with learning curves and profiles; returns its path."""
        names = self.contenders
        title = f"Comparison of {len(names)} contenders on {_number(len(self.tasks), 'task')}"
        parts = [f"<h1>{escape(title)}</h1><p class=id>{escape('; '.join(names))}</p>"]
        parts.append(f"<h3>What can be said</h3><ul>{''.join(f'<li>{escape(note)}</li>' for note in self.notes)}</ul>")
        for task in self.tasks:
            here = [entry for entry in self.entries if entry.task == task]
            members = [(e.run, e.summary, {**e.setting, "style": names.index(e.contender)}) for e in here]
            parts.append(f"<h2>{escape(task)}</h2><h3>Final greedy returns</h3>{report.side_by_side(members, _random(here))}")
            if pairs := [pair for pair in self.pairs if pair.tasks == [task]]:
                parts.append(f"<h3>Probability of improvement</h3>{page.table(PAIRS, map(_pair_row, pairs))}")
        over = [pair for pair in self.pairs if len(pair.tasks) > 1]
        if over or self.profile:
            parts.append("<h2>Over tasks</h2>" if len(self.tasks) > 1 else "")
        if over:
            parts.append(f"<h3>Probability of improvement, averaged over tasks</h3>{page.table(PAIRS, map(_pair_row, over))}")
        if self.profile:
            few = any(len(task) < report.ENOUGH_SEEDS for tasks in self.profile.scores.values() for task in tasks)
            caption = "share of runs with a score above the threshold; band: 95% bootstrap interval at each threshold"
            caption += "; spread not established" if few else ""
            totals = _totals(self.profile)
            table = page.table(totals[0], totals[1:]) if totals else ""
            image = page.image(_profile_figure(self.profile, names), caption)
            parts.append(f"<h3>Performance profile</h3>{image}{table}")
        runs = {str(entry.run.path): entry.summary for entry in self.entries}
        about = [
            (f"{of['name']}/{of['config_hash']}", f"{of['agent']} on {of['env']}: {of['command'] or place}")
            for place, of in runs.items()
        ]
        parts.append(f"<h2>Runs</h2>{page.terms(about)}")
        return write_whole(Path(out), page.document(title, "\n".join(parts)))


def compare(paths: str | Path | Sequence[str | Path]) -> Comparison:
    """Compare the contenders of finished runs; each setting of a run that sweeps is one.

    Raises:
      FileNotFoundError, ValueError: no run directory (see `report.read_run`), a run that is not finished or has no greedy
        returns, a contender that is there twice on one task, or no task with two contenders; one line that names it.
    """
    places = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for i, path in enumerate(places):
        if path.resolve() in [other.resolve() for other in places[:i]]:
            raise ValueError(f"{path} is named twice: a run cannot be compared with itself")
    entries, notes = _labelled([entry for path in places for entry in _entries(path)])
    tasks = {task: [entry for entry in entries if entry.task == task] for task in dict.fromkeys(e.task for e in entries)}
    for task, here in tasks.items():
        for a, b in itertools.combinations(here, 2):
            if a.contender == b.contender:
                raise ValueError(
                    f"{a.run.path} and {b.run.path} are the same contender, {a.contender} on {task}: their settings are the same "
                    "but for seeds and evaluations; train it on all seeds in one run"
                )
    if max(map(len, tasks.values()), default=0) < 2:
        found = "; ".join(f"{here[0].contender} on {task}" for task, here in tasks.items())
        raise ValueError(f"two contenders on one task are needed, and there is {found or 'no run'}")
    pairs = _pairs(entries, list(tasks))
    profile, reason = _profile(tasks)
    notes = [*_findings(pairs), *_cautions(tasks), *notes, *([reason] if reason else [])]
    return Comparison(entries, pairs, profile, notes)


# Reading


def _entries(path: Path) -> list[Entry]:
    """One for each setting of a run that was not dropped on the way, whose labels are not known yet."""
    run = report.read_run(path)
    if run.info.get("status") != "finished":
        done, asked = (f"{run.info.get(key) or 0:,}" for key in ("steps_done", "steps_asked"))
        raise ValueError(
            f"{path} is not finished, {done} of {asked} steps are done: `rljax run {shlex.quote(str(path))}` goes on"
        )
    if not any(row.get(report.EVALUATION) is not None for row in run.rows):
        raise ValueError(f"{path}: a run of {run.info['agent']} without greedy returns, which are what is compared")
    try:
        config = tomllib.loads(run.config)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path / 'config.toml'}: not valid TOML: {error}") from None
    summary = report.summarize(run)
    own = _settings(config)
    entries = []
    for setting in (setting for setting in summary["settings"] if setting["dropped"] is None):
        values = {**own, **setting["values"]}
        params = {key.partition(".")[2]: key for key in values if key.startswith("env_params.")}
        place = _place(run.info["env"], {name: values[key] for name, key in params.items()})
        values = {key: value for key, value in values.items() if key not in place}
        protocol = {key: config.get(key) for key in PROTOCOL[1:]}
        entries.append(Entry("", "", run, summary, setting, place, values, protocol))
    return entries


def _place(env: str, params: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation plays, by its dotted keys."""
    played = {key: value for key, value in params.items() if key not in FOR_LEARNING or not env.startswith(FOR_LEARNING[key])}
    return {"env": env, **{f"env_params.{key}": value for key, value in played.items()}}


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """{dotted key: value} of what decides what is learned; what runs first is one value, its name and a digest of the same."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key in SOURCES:
            digest = hashlib.sha256(
                json.dumps({"env": value.get("env"), **_settings(value)}, sort_keys=True).encode()
            ).hexdigest()
            settings[key] = f"{value.get('name')}/{digest[:6]}"
        elif key == "data" and value:
            files = zip(value, config.get("data_digest") or value, strict=False)
            settings[key] = " + ".join(file if file == digest else f"{Path(file).name} ({digest})" for file, digest in files)
        elif isinstance(value, dict) and key != "sweep":
            settings |= {f"{key}.{name}": item for name, item in value.items()}
        elif key not in (*ASIDE, *PROTOCOL):
            settings[key] = value
    if settings.get("algo.anneal_steps") == config.get("total_steps"):  # its default
        settings.pop("algo.anneal_steps", None)
    return settings


def _differing(dicts: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which they are not all the same."""
    keys = dict.fromkeys(key for values in dicts for key in values)
    return [key for key in keys if len({json.dumps(values.get(key), default=str) for values in dicts}) > 1]


def _short(keys: Sequence[str]) -> dict[str, str]:
    """{key: its last part, or all of it where two would look the same}."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def _telling(groups: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[str], list[str]]:
    """(keys for labels, the other keys in which the settings within a group differ): all of them where they are few, else those
    that tell the settings of each group apart, taken one by one so that each tells as many apart as it can."""
    differing = list(dict.fromkeys(key for group in groups for key in _differing(group)))
    if len(differing) <= LABEL_SETTINGS:
        return differing, []

    def kinds(keys: Sequence[str]) -> int:
        return sum(len({json.dumps([values.get(key) for key in keys], default=str) for values in group}) for group in groups)

    chosen: list[str] = []
    while kinds(chosen) < kinds(differing):
        chosen.append(max(differing, key=lambda key: kinds([*chosen, key])))
    return chosen, [key for key in differing if key not in chosen]


def _labelled(entries: list[Entry]) -> tuple[list[Entry], list[str]]:
    """With the labels of tasks and contenders, and what is to be said about these."""
    notes = []
    by_env: dict[str, list[Entry]] = {}
    for entry in entries:
        by_env.setdefault(entry.place["env"], []).append(entry)
    of_env = {env: _short(_differing([entry.place for entry in here])) for env, here in by_env.items()}

    def task_of(entry: Entry) -> str:
        env = entry.place["env"]
        return _with(env, [f"{name}={entry.place[key]}" for key, name in of_env[env].items() if key in entry.place])

    entries = [replace(entry, task=task_of(entry)) for entry in entries]
    of_agent: dict[str, dict[str, str]] = {}
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for entry in entries:
        groups.setdefault(entry.summary["agent"], {}).setdefault(entry.task, []).append(entry.values)
    for agent, by_task in groups.items():
        keys, hidden = _telling(list(by_task.values()))
        of_agent[agent] = _short(keys)
        if hidden:
            names = ", ".join(_short(hidden).values())
            notes.append(
                f"Labels of {agent} leave out settings in which it differs on one task, and which may explain more: {names}."
            )

    def contender_of(entry: Entry) -> str:
        agent = entry.summary["agent"]
        return _with(agent, [f"{name}={entry.values.get(key, 'unset')}" for key, name in of_agent[agent].items()])

    labels = [contender_of(entry) for entry in entries]
    entries = [
        replace(e, contender=label, setting={**e.setting, "label": label}) for e, label in zip(entries, labels, strict=True)
    ]
    uneven: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        if keys := _differing([entry.values for entry in entries if entry.contender == label]):
            uneven.setdefault(", ".join(_short(keys).values()), []).append(label)
    notes += [f"Settings are not the same on every task: {names} of {'; '.join(of)}." for names, of in uneven.items()]
    return entries, notes


def _with(name: str, settings: Sequence[str]) -> str:
    return f"{name} ({', '.join(settings)})" if settings else name


def _random(entries: Sequence[Entry]) -> dict[str, Any] | None:
    """The random policy's return on a task, of the run that played it for the most episodes."""
    known = [entry.random for entry in entries if entry.random and entry.random.get("return") is not None]
    return max(known, key=lambda random: random.get("episodes") or 0, default=None)


# Comparing


def _pairs(entries: Sequence[Entry], tasks: Sequence[str]) -> list[Pair]:
    """Every two contenders on each task that both have, and on all of those together where they are more than one."""
    scores = {(entry.contender, entry.task): entry.scores for entry in entries}
    contenders = dict.fromkeys(entry.contender for entry in entries)
    by_task: list[Pair] = []
    over: list[Pair] = []
    for x, y in itertools.combinations(contenders, 2):
        shared = [task for task in tasks if (x, task) in scores and (y, task) in scores]
        for pairs, chosen in ((by_task, [[task] for task in shared]), (over, [shared] if len(shared) > 1 else [])):
            for group in chosen:
                of_x, of_y = ([scores[name, task] for task in group] for name in (x, y))
                seeds = (min(map(len, of_x)), min(map(len, of_y)))
                probability = probability_of_improvement(of_x, of_y) if min(seeds) else None
                low, high = improvement_interval(of_x, of_y) if min(seeds) > 1 else (None, None)
                pairs.append(Pair(x, y, group, seeds, probability, low, high))
    return by_task + over


def _anchors(entries: Sequence[Entry]) -> dict[str, float]:
    """``random_return`` and ``expert_return`` of a task, as the data sets of its offline runs have them.

    Raises:
      ValueError: there are none, or more than one pair of them.
    """
    found = []
    for entry in entries:
        data = entry.summary["data"] or {}
        if "env" not in data or _place(data["env"], data.get("env_params") or {}) == entry.place:  # others do not say where
            anchors = {key: data[key] for key in ("random_return", "expert_return") if isinstance(data.get(key), int | float)}
            found += [anchors] if len(anchors) == 2 and anchors not in found else []
    task = entries[0].task
    if not found:
        raise ValueError(f"no expert's return is known for {task}")
    if len(found) > 1:
        raise ValueError(f"the data sets of {task} have different anchors")
    normalized_score(0.0, found[0], task)
    return found[0]


def _profile(tasks: dict[str, list[Entry]]) -> tuple[Profile | None, str]:
    """The profile of the contenders that have scores on every task, and a sentence on what is left out."""
    names = dict.fromkeys(entry.contender for here in tasks.values() for entry in here)
    scores: dict[str, list[np.ndarray]] = {name: [] for name in names}
    unit, reason = "normalised score, 0: random policy, 100: expert of the data", ""
    try:
        anchors = {task: _anchors(here) for task, here in tasks.items()}
    except ValueError as error:
        if len(tasks) > 1:
            reason = f"There is no performance profile over tasks: {error}, and returns of different scales are not put together"
            return None, f"{reason}. An offline run on data with both anchors brings them (`rljax record --expert`)."
        anchors, unit = {}, "final greedy return"
    for task, here in tasks.items():
        for entry in here:
            of = normalized_score(entry.scores, anchors[task], task) if anchors else entry.scores
            scores[entry.contender] += [of] if len(of) else []
    left = [name for name in names if len(scores[name]) < len(tasks)]
    scores = {name: scores[name] for name in names if name not in left}
    if left:
        reason = f"The performance profile leaves out what has no score on some task: {', '.join(left)}."
    if len(scores) < 2:
        return None, reason
    every = np.unique(np.concatenate([task for of in scores.values() for task in of]))
    margin = 0.04 * (np.ptp(every) or 1.0)
    thresholds = np.concatenate([[every[0] - margin], every, [every[-1] + margin]])
    shares = {name: performance_profile(of, thresholds) for name, of in scores.items()}
    bands = {name: profile_band(of, thresholds) for name, of in scores.items()}
    return Profile(unit, scores, thresholds, shares, bands), reason


# Words


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _pair_row(pair: Pair) -> list[str]:
    number = page.number_format([1.0])
    interval = "n/a" if pair.low is None else f"[{number(pair.low)}, {number(pair.high)}]"
    seeds = " and ".join(map(str, pair.seeds))
    return [f"{pair.x} > {pair.y}", seeds, number(pair.probability), interval, pair.reading]


def _pair_lines(pairs: Sequence[Pair]) -> list[str]:
    return [*_indented(page.columns([PAIRS, *map(_pair_row, pairs)])), ""] if pairs else []


def _totals(profile: Profile | None) -> list[list[str]]:
    """A table of the contenders' scores over several tasks, with its header; empty where there are none on one scale."""
    if profile is None or len(next(iter(profile.scores.values()))) < 2:
        return []
    rows = []
    for name, of in profile.scores.items():
        low, high = bootstrap_interval(of)
        interval = "n/a" if np.isnan(low) else f"[{low:.1f}, {high:.1f}]"
        rows.append([name, str(sum(map(len, of))), f"{iqm(np.concatenate(of)):.1f}", interval])
    return [["contender", "runs", "IQM of normalised scores", "95% interval"], *rows]


def _findings(pairs: Sequence[Pair]) -> list[str]:
    """What the pairs show, those over all tasks first, and what they do not."""
    kinds: dict[str, list[str]] = {"higher": [], "no difference shown": [], "not established": []}
    several = len({task for pair in pairs for task in pair.tasks}) > 1
    for pair in sorted(pairs, key=lambda pair: -len(pair.tasks)):
        where = f" on {pair.tasks[0] if len(pair.tasks) == 1 else f'{len(pair.tasks)} tasks on average'}" if several else ""
        better, worse = (pair.x, pair.y) if pair.reading == "X higher" else (pair.y, pair.x)
        if pair.reading in kinds:
            kinds[pair.reading].append(f"{pair.x} and {pair.y}{where}")
        else:
            kinds["higher"].append(f"{better} than {worse}{where}")
    words = {
        "higher": "Higher, more often than not",
        "no difference shown": "No difference is shown, which is not to say that there is none (the interval holds 0.5)",
        "not established": f"Fewer than {report.ENOUGH_SEEDS} seeds establish nothing, whatever the interval is",
    }
    notes = [
        f"{words[kind]}: {'; '.join(found) if len(found) <= FEW else f'{len(found)} of {len(pairs)} pairs, as the tables say'}."
        for kind, found in kinds.items()
        if found
    ]
    notes.append("P(X > Y) says how often X scores above Y, ties counted one half, and not by how much: that is in the returns.")
    if any(pair.low in (0.0, 1.0) and pair.low == pair.high for pair in pairs):
        notes.append(
            "[0, 0] and [1, 1] say that no seed of one is among those of the other, and not that no further seed will be."
        )
    if len(pairs) > 1:
        often = "one in twenty or more would leave out 0.5"
        notes.append(f"The {len(pairs)} intervals are at 95% each: of pairs without a difference, {often}.")
    return notes


def _cautions(tasks: dict[str, list[Entry]]) -> list[str]:
    """What makes the contenders of a task unequal."""
    notes = []
    for task, here in tasks.items():
        steps = [entry.summary["steps_done"] or 0 for entry in here]
        if min(steps) < max(steps):
            offline = "; those of an offline agent are gradient steps" if any("data" in entry.values for entry in here) else ""
            notes.append(f"On {task} they had not as many steps, {min(steps):,} to {max(steps):,} a seed{offline}.")
        if keys := _differing([entry.protocol for entry in here]):
            notes.append(f"On {task} they were not evaluated alike: {', '.join(keys)} differ.")
        for entry in here:
            if lost := entry.setting["failed"]:
                seeds = f"{len(lost)} of {len(lost) + len(entry.setting['seeds'])} seeds"
                notes.append(f"{entry.contender} on {task}: {seeds} failed and are left out, which flatters what is left.")
    for summary in {id(entry.run): entry.summary for here in tasks.values() for entry in here}.values():
        if dropped := [setting["label"] for setting in summary["settings"] if setting["dropped"] is not None]:
            run = f"{summary['name']}/{summary['config_hash']}"
            notes.append(f"Of {run} halving has dropped, and so they are left out here: {'; '.join(dropped)}.")
    if any(run is other for here in tasks.values() for run, other in itertools.combinations([entry.run for entry in here], 2)):
        notes.append("The best setting of a sweep, if it is picked on these seeds, is optimistic beside what was not picked.")
    return notes


def _profile_figure(profile: Profile, names: Sequence[str]) -> bytes:
    from matplotlib.ticker import ScalarFormatter

    figure, (ax,) = page.figure(1, 1, 8.0, 4.0)
    alpha = 0.18 if len(profile.shares) <= 4 else 0.08
    for name, share in profile.shares.items():
        colour, dash = page.line_style(names.index(name))
        ax.fill_between(profile.thresholds, *profile.bands[name].T, step="post", color=colour, alpha=alpha, linewidth=0)
        ax.step(profile.thresholds, share, where="post", color=colour, linestyle=dash, linewidth=1.8, label=name)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xlabel(profile.unit, fontsize=9)
    ax.set_ylabel("share of runs above it", fontsize=9)
    ax.set_ylim(-0.02, 1.02)
    page.legend(figure, ax)
    return page.png(figure)
