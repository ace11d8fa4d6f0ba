"""The ``rljax`` command: thin, over `rljax.experiment`. Nothing here imports jax before a subcommand needs it."""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

COMMANDS = {
    "run": "train every lane of a config; resumes a run that was stopped",
    "plan": "what a run would be: programs, lanes, memory; trains nothing",
    "submit": "queue a job for each program of a config, on Slurm through submitit",
    "redteam": "search the reward of a config's token environment for cheap answers that it pays; trains nothing",
    "eval": "evaluate the last checkpoint of a run, in its own environment or in another",
    "record": "play the last policy of a run and write a data set for offline agents",
    "replay": "play the episodes of a trace again, token for token, and say where they differ",
    "fetch": "download a pretrained model: smollm2",
    "export": "write the policy of one lane for use without rljax: a folder that jax alone loads, or a Hugging Face directory",
    "report": "write report.html of one run, or of several side by side",
    "compare": "which of the algorithms and settings of finished runs scores higher, and how sure that is",
    "reproduce": "run the config of a run again in another directory and compare the results",
    "list": "environments, agents, graders and configs, a line each",
}

OWN_OPTIONS = {  # of the commands that take those of a config too
    "run": {
        "--fresh": "start over, deleting what the run directory holds",
        "--log SINK ...": "send the metrics there too: tensorboard, wandb, trackio",
        "--processes N": "that share the run, each started with this command; auto: those of a TPU pod, Slurm or Open MPI job",
        "--process I": "which of them this is, from 0",
        "--coordinator HOST:PORT": "where process 0 listens and the others find it",
    },
    "plan": {"--probe": "train a chunk or two and evaluate once, to say how long each program would take"},
    "submit": {
        "--slurm.KEY VALUE": "a parameter of submitit, as in --slurm.partition gpu --slurm.time 240 --slurm.gpus_per_node 1",
        "--cluster local": "start the jobs as processes of this machine",
        "--log SINK ...": "send the metrics there too, as run does",
    },
    "redteam": {
        "--prompts N": "that every answer is played on; default: 64",
        "--seed S": "of the prompts and draws; default: 0",
        "--json FILE": "write what was found there too",
    },
}


STOPPED = 75  # exit status: saved, and the same command goes on; sysexits.h calls it a temporary failure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 1 for a failure on the way, 2 for wrong input, `STOPPED`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in OWN_OPTIONS:  # argparse cannot know their options before the config has been read
        arguments = argparse.Namespace(command=argv[0], arguments=argv[1:])
    else:
        parser = _parser()
        arguments, arguments.rest = parser.parse_known_args(argv)
        if arguments.rest and arguments.command != "eval":  # which takes parameters of an environment
            parser.error(f"unrecognized arguments: {' '.join(arguments.rest)}")
    from rljax.experiment import hosts

    status = 1
    try:
        status = _status(arguments)
    except (RuntimeError, AssertionError) as error:
        if (reason := _no_device(error)) is None:
            raise
        print(f"rljax: JAX_PLATFORMS: {reason}", file=sys.stderr)
        status = 2
    finally:
        hosts.leave(0 if status == STOPPED else status)  # all have saved together
    return status


def _no_device(error: Exception) -> str | None:
    """Why jax has no device, if that is what ``error`` is about."""
    if str(error).startswith(("Unable to initialize backend", "Backend '")):
        return str(error).splitlines()[0]
    if isinstance(error, AssertionError):  # what jax says of cuda where no card is visible, and nothing more
        import jax

        try:
            jax.devices()
        except AssertionError:
            asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
            return f"there is no device of {asked!r} here; leave it empty to take what there is, or name cpu"
    return None


def _status(arguments: argparse.Namespace) -> int:
    from rljax.envs import EnvironmentFailed
    from rljax.experiment import InputError, SaveError, Stopped, hosts

    try:
        return globals()[f"_{arguments.command}"](arguments)
    except InputError as error:
        print(f"rljax: {error}", file=sys.stderr)
        return 2
    except SaveError as error:
        print(f"rljax: {error}; make room and run the same command again to go on", file=sys.stderr)
        return 1
    except EnvironmentFailed as error:
        print(f"rljax: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        if hosts.leads():
            print(f"rljax: stopped by SIGTERM, {stopped}; the same command goes on from there", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("rljax: stopped; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1 if hosts.joined() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rljax",
        description="Reinforcement learning as one compiled program over many seeds.",
        epilog="`rljax run CONFIG --help` lists every option of that config.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rljax {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, doc in COMMANDS.items():
        command = commands.add_parser(name, help=doc, description=doc, allow_abbrev=False)
        if name in ("eval", "record", "reproduce", "export"):
            command.add_argument("run", help="a run directory, as in runs/ppo_cartpole/0123456789ab")
        if name == "eval":
            command.add_argument("--episodes", type=int, help="per lane; default: as in training")
            command.add_argument("--seed", type=int, help="of the episodes; default: the very episodes of training")
            command.add_argument(
                "--transcript", action="store_true", help="what a language model says, 4 episodes a lane or --episodes"
            )
            command.add_argument("--gif", action="store_true", help="draw an episode of one lane, or --episodes of them")
            command.add_argument("--lane", type=int, help="of --gif; default: the one with the highest return")
            command.add_argument("--samples", type=int, metavar="N", help="answers to each prompt: pass@k and best of N")
            command.add_argument("--sample", action="store_true", help="draw actions as in training, not the likeliest")
            command.add_argument("--env", help="play another environment; --env_params.KEY VALUE: with other parameters")
            command.add_argument("--trace", metavar="FILE", help="write the transcript there, for `rljax replay`")
        if name == "record":
            command.add_argument("target", help="the file to write, .npz or .h5, or minari:NAME")
            command.add_argument("--steps", type=int, default=100_000, help="of the environment; default: 100000")
            command.add_argument("--epsilon", type=float, default=0.0, help="share of uniformly random actions; default: 0")
            command.add_argument("--lane", type=int, default=0, help="whose policy; default: 0")
            command.add_argument("--expert", metavar="RUN", help="a run whose return is 100 on the scale of normalised scores")
            command.add_argument("--seed", type=int, default=0, help="of the episodes; default: 0")
        if name == "export":
            command.add_argument("target", help="the directory to write; nothing that is there is written over")
            command.add_argument("--lane", type=int, default=0, help="whose policy; default: 0")
        if name == "replay":
            command.add_argument("trace", help="a file of the run's samples/, or that eval --trace wrote")
        if name == "fetch":
            command.add_argument("model", help="its name")
        if name == "reproduce":
            command.add_argument("--out", default="runs/reproduced", help="where the new run goes")
        if name == "report":
            command.add_argument("runs", nargs="+", metavar="run", help="run directories")
            command.add_argument("--output", help="the file to write; default: report.html in the run, or here for several")
        if name == "compare":
            command.add_argument("runs", nargs="+", metavar="run", help="directories of finished runs, of one task or several")
            command.add_argument("--out", metavar="FILE", help="write a page with learning curves and performance profiles too")
        if name == "list":
            command.add_argument("what", nargs="?", choices=("envs", "agents", "graders", "configs"), help="default: all")
    return parser


def _version() -> str:
    from rljax import __version__

    return __version__


def _parsed(arguments: list[str]) -> tuple[str | None, dict[str, Any]]:
    """``(CONFIG, {KEY: VALUE})`` of ``[CONFIG] [--KEY VALUE ...]``; CONFIG, a TOML file or a run directory, comes first."""
    from rljax.experiment import InputError, parse_overrides

    for argument in arguments:
        if owners := [name for name, options in OWN_OPTIONS.items() if argument in options]:
            raise InputError(f"{argument} is an option of `rljax {owners[0]}` alone")
    config = arguments[0] if arguments and not arguments[0].startswith("-") else None
    return config, parse_overrides(arguments[config is not None :])


def _experiment(config: str | None, overrides: dict[str, Any], command: str = "run") -> Any:
    from rljax.experiment import InputError, load

    if config is None and "env" not in overrides:
        raise InputError(f"name a config file, as in `rljax {command} experiments/ppo_cartpole.toml` (`rljax list configs`)")
    experiment = load(config, overrides)
    if config is not None and Path(config).is_dir() and not overrides and experiment.path.name != Path(config).resolve().name:
        raise InputError(
            f"{config} is a run whose config is now called {experiment.hash}, so that another would begin beside it; "
            f"`rljax {command} {config}/config.toml` begins that"
        )
    return experiment


def _options(command: str, arguments: list[str]) -> int:
    """Help of a command that takes a config: every option with its value in the config at hand."""
    from rljax.experiment.config import describe

    own = OWN_OPTIONS[command]
    usage = "".join(f" [{option}]" for option in own)
    print(f"usage: rljax {command} [CONFIG]{usage} [--KEY VALUE ...]\n\n{COMMANDS[command]}\n")
    print("CONFIG is a TOML file or a run directory; it comes first. A --KEY overrides it.")
    for option, doc in own.items():
        print(f"{option}: {doc}")
    arguments = arguments or ["--env", "CartPole-v1", "--total-steps", "1"]
    rows = describe(_experiment(*_parsed(arguments)))
    width = max(len(key) for key, _, _ in rows) + 2
    print()
    for key, value, doc in rows:
        print(f"  --{key:<{width}}{value}\n{'':<{width + 4}}{doc}")
    print("\n[traced] options can be swept in one program: --sweep.algo.learning-rate 1e-4 3e-4 1e-3")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    rest = [argument for argument in arguments.arguments if argument not in ("-h", "--help", "--fresh")]
    if len(rest) < len(arguments.arguments) - arguments.arguments.count("--fresh"):
        return _options("run", rest)
    from rljax.experiment import hosts, run, summary_text
    from rljax.experiment.report import sweep_text

    config, overrides = _parsed(rest)
    _join(overrides)
    log = overrides.pop("log", ())
    experiment = _experiment(config, overrides)
    programs, members = experiment.programs(), []
    options = {"fresh": "--fresh" in arguments.arguments, "argv": ["rljax", *sys.argv[1:]], "log": log, "draw": True}
    with _Terminated() as terminated:
        for i, program in enumerate(programs):
            if not hosts.leads():
                run(program, stop=terminated, **options)
                continue
            if len(programs) > 1:
                print(f"program {i + 1} of {len(programs)}")
            with _Progress() as progress:
                result = run(program, listener=progress, stop=terminated, **options)
            print(summary_text(result.summary))
            print(f"\n{result.path}/report.html")
            fixed = {key: program.value(key) for key in experiment.sweep if key not in program.sweep}
            members.append((fixed, result.summary))
    if len(members) > 1:
        print(f"\n{sweep_text(members)}")
    return 0


def _join(overrides: dict[str, Any]) -> None:
    """Joins the other processes of a run, if any are named; takes out what names them."""
    from rljax.experiment import InputError, hosts

    given = {name: overrides.pop(name) for name in ("processes", "process", "coordinator") if name in overrides}
    if given:
        if "processes" not in given:
            raise InputError(f"--processes N is missing, which goes with --{next(iter(given))}")
        processes, process = given.get("processes"), given.get("process")
        for option, number in (("processes", 0 if processes == "auto" else processes), ("process", process or 0)):
            if type(number) is not int or number < 0 or processes == 0:
                raise InputError(f"--{option} must be a number{' or auto' * (option == 'processes')}, got {given.get(option)!r}")
        hosts.join(given.get("coordinator"), None if processes == "auto" else processes, process)


def _plan(arguments: argparse.Namespace) -> int:
    rest = [argument for argument in arguments.arguments if argument not in ("-h", "--help", "--probe")]
    probe = "--probe" in arguments.arguments
    if len(rest) + arguments.arguments.count("--probe") < len(arguments.arguments):
        return _options("plan", rest)
    from rljax.experiment import plan

    programs = _experiment(*_parsed(rest)).programs()
    print(f"{len(programs)} program{'s' * (len(programs) > 1)}")
    seconds = 0.0
    for program in programs:
        p = plan(program, probe)
        memory = "unknown" if p["device_bytes"] is None else _bytes(p["device_bytes"])
        print(
            f"\n{p['path']}\n"
            f"  lanes         {p['lanes']} over {p['devices']} device{'s' * (p['devices'] > 1)}, "
            f"{p['lanes_at_once']} at once on each\n"
            f"  steps         {p['steps_per_seed']:,} per seed, {p['steps_all_lanes']:,} in all "
            f"({p['updates']:,} updates of {p['env_steps_per_update']:,}, {p['updates_per_chunk']} a chunk)\n"
            f"  evaluations   {p['evaluations']}, {p['eval_episodes_all_lanes']:,} episodes in all\n"
            f"  memory        {memory} on each device, of which {_bytes(p['state_bytes'] // p['devices'])} is state\n"
            f"  compilation   {p['compile_seconds']:.1f} s"
        )
        if probe:
            seconds += p["wall_seconds"]
            print(
                f"  wall time     about {_duration(p['wall_seconds'])}: {p['start_seconds']:.1f} s to start, "
                f"{p['chunks']} chunks of {p['chunk_seconds']:.3g} s{' at first' * bool(program.sweep_halving)}, "
                f"{p['evaluations']} evaluations of {p['evaluation_seconds']:.3g} s with untrained policies"
            )
        for source in p["first"]:
            print(f"  first         {source}")
    if probe and len(programs) > 1:
        print(f"\nwall time of all programs, one after the other: about {_duration(seconds)}")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    rest = [argument for argument in arguments.arguments if argument not in ("-h", "--help")]
    if len(rest) < len(arguments.arguments):
        return _options("submit", rest)
    from rljax import jobs
    from rljax.experiment import InputError, is_finished, sinks

    config, overrides = _parsed(rest)
    log = sinks.check(overrides.pop("log", ()))
    cluster = overrides.pop("cluster", "slurm")
    parameters = {key[6:]: overrides.pop(key) for key in list(overrides) if key.startswith("slurm.")}
    experiment = _experiment(config, overrides, "submit")
    try:
        executor = jobs.executor(Path(experiment.out, experiment.name, "jobs").absolute(), str(cluster), parameters)
        paths = []
        for program in experiment.programs():
            if is_finished(program):
                print(f"finished already: {program.path}")
                continue
            program.path.mkdir(parents=True, exist_ok=True)
            (program.path / "config.toml").write_text(program.to_toml())
            paths.append(program.path.absolute())
        queued = jobs.submit(executor, paths, log) if paths else []
    except OSError as error:
        raise InputError(f"out: cannot write to {experiment.out}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(str(error)) from error
    for job, path in zip(queued, paths, strict=True):
        print(f"job {job.job_id}   {path}\n  log {job.paths.stdout}")
    return 0


def _redteam(arguments: argparse.Namespace) -> int:
    rest = [argument for argument in arguments.arguments if argument not in ("-h", "--help")]
    if len(rest) < len(arguments.arguments):
        return _options("redteam", rest)
    import json

    from rljax.experiment import InputError, load, red_team

    config, overrides = _parsed(rest)
    file = overrides.pop("json", None)
    given = {name: overrides.pop(name) for name in ("prompts", "seed") if name in overrides}
    if config is None:
        raise InputError("redteam: name a config file or a run first, as in `rljax redteam experiments/grpo_addition.toml`")
    experiment = load(config, overrides)
    found = red_team(experiment, **given)
    params = "".join(f", {key} {value!r}" for key, value in experiment.env_params.items() if not isinstance(value, dict))
    print(f"{experiment.env}{params}: {found.prompts} prompts, up to {found.max_tokens} tokens\n\n{found.table()}")
    if file is not None:
        data = {"env": experiment.env, "env_params": experiment.env_params, **found.to_dict()}
        try:
            Path(str(file)).write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--json: cannot write {file}: {error.strerror}") from error
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    import numpy as np

    from rljax.experiment import InputError, evaluate, load_run

    if arguments.episodes is not None and arguments.episodes < 1:
        raise InputError(f"--episodes must be >= 1, got {arguments.episodes}")
    if arguments.lane is not None and not arguments.gif:
        raise InputError("--lane goes with --gif: an evaluation is of all lanes")
    transcript, is_read = "--trace" if arguments.trace else "--transcript", arguments.transcript or arguments.trace
    asked = {"--gif": arguments.gif, transcript: is_read, "--samples": arguments.samples is not None}
    wanted = [name for name, is_asked in asked.items() if is_asked]
    if len(wanted) > 1:
        raise InputError(f"{' and '.join(wanted)} ask for different things: call eval once for each")
    if arguments.gif:
        return _gif(arguments)
    if is_read:
        return _transcript(arguments)
    if arguments.samples is not None:
        return _samples(arguments)
    overrides = _elsewhere(arguments)
    steps, evaluation = evaluate(arguments.run, arguments.episodes, arguments.seed, overrides, not arguments.sample)
    lanes, failures = load_run(arguments.run).lanes(), _failures(arguments.run)
    how = "sampled" if arguments.sample else "greedy"
    where = "".join(f", {key} {value}" for key, value in overrides.items())
    print(f"{how}, {evaluation.returns.shape[1]} episodes a lane, after {steps:,} steps{where}")
    for lane, returns, lengths, finished in zip(lanes, evaluation.returns, evaluation.lengths, evaluation.finished, strict=True):
        settings = "".join(f"  {key}={value:g}" for key, value in lane.items() if key not in ("lane", "seed"))
        unfinished = f"  {int((~finished).sum())} unfinished" if not finished.all() else ""
        known = returns[~np.isnan(returns)]
        mean, std = (known.mean(), known.std()) if known.size else (float("nan"), float("nan"))
        print(
            f"lane {lane['lane']:>3}  seed {lane['seed']:>3}{settings}  return {mean:.2f} +- {std:.2f}  "
            f"length {lengths.mean():.1f}{unfinished}{failures.get(lane['lane'], '')}"
        )
    return 0


def _gif(arguments: argparse.Namespace) -> int:
    from rljax.experiment import load_run, picture

    overrides = _elsewhere(arguments)
    sizes = (arguments.lane, arguments.episodes or 1, arguments.seed)
    file, about = picture(arguments.run, *sizes, overrides, not arguments.sample)
    lanes = load_run(arguments.run).lanes()
    best = f", the best of {len(lanes)}" if arguments.lane is None and len(lanes) > 1 else ""
    where = "".join(f", {key} {value}" for key, value in overrides.items())
    failure = _failures(arguments.run).get(about["lane"], "")
    print(f"lane {about['lane']}, seed {about['seed']}{best}, after {about['step']:,} steps{where}{failure}")
    for score, length, finished in zip(about["returns"], about["lengths"], about["finished"], strict=True):
        print(f"return {score:.6g} in {length:,} steps{'' if finished else ', unfinished'}")
    print(file)
    return 0


def _failures(run: str) -> dict[int, str]:
    """What must be said beside the numbers of the lanes that have failed in training."""
    from rljax.experiment.directory import read_json

    file = Path(run) / "run.json"
    failed = read_json(file).get("failed", []) if file.is_file() else []
    return {entry["lane"]: f"  failed at step {entry['step']:,}: {entry['reason']}" for entry in failed}


def _elsewhere(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``eval`` changes of the run's environment."""
    from rljax.experiment import parse_overrides

    return ({} if arguments.env is None else {"env": arguments.env}) | parse_overrides(arguments.rest)


def _transcript(arguments: argparse.Namespace) -> int:
    from rljax.experiment import trace, traces

    sizes = (arguments.episodes or 4, arguments.seed, not arguments.sample)
    head, episodes = trace(arguments.run, *sizes, overrides=_elsewhere(arguments))
    if arguments.transcript:
        print(f"rewards are {_payer(arguments)}")
    for row in episodes if arguments.transcript else []:
        reward = "invalid" if row["reward"] is None else f"{row['reward']:g}"
        cut = "  (cut)" if row["truncated"] else ""
        print(
            f"lane {row['lane']:>3}  seed {row['seed']:>3}  reward {reward:>7}  {row['prompt']!r} -> {row['completion']!r}{cut}"
        )
    if arguments.trace:
        traces.write(Path(arguments.trace), head, episodes)
        print(arguments.trace)
    return 0


def _payer(arguments: argparse.Namespace) -> str:
    """Whose word the rewards of a transcript are."""
    from rljax.experiment import load_run

    source = load_run(arguments.run).reward_from
    if source is None or _elsewhere(arguments):
        return "the environment's"
    return f"those of the reward model {source.path}; `rljax eval` alone gives the environment's"


def _samples(arguments: argparse.Namespace) -> int:
    import numpy as np

    from rljax.experiment import InputError, load_run, sample_answers
    from rljax.ops.groups import pass_at_k

    if arguments.samples < 1:
        raise InputError(f"--samples must be >= 1, got {arguments.samples}")
    experiment = load_run(arguments.run)
    prompts = arguments.episodes or experiment.eval_episodes
    rewards, right = sample_answers(arguments.run, prompts, arguments.samples, arguments.seed, _elsewhere(arguments))
    print(f"{arguments.samples} sampled answers to each of {prompts} prompts a lane")
    ks = [2**i for i in range(arguments.samples.bit_length())]
    print(f"rewards are {_payer(arguments)}")
    for lane, lane_rewards, lane_right in zip(experiment.lanes(), rewards, right, strict=True):
        known = lane_rewards[~np.isnan(lane_rewards).all(1)]
        best = "invalid"
        if len(known):
            best = f"reward {np.nanmean(known):.3f}  best of {arguments.samples} {np.nanmax(known, 1).mean():.3f}"
        passes = "  ".join(f"pass@{k} {float(pass_at_k(lane_right, k).mean()):.3f}" for k in ks)
        print(f"lane {lane['lane']:>3}  seed {lane['seed']:>3}  {best}  {passes}")
    return 0


def _record(arguments: argparse.Namespace) -> int:
    from rljax.experiment import record, write
    from rljax.experiment.data import check_target

    check_target(arguments.target)  # before anything is played
    options = {name: getattr(arguments, name) for name in ("epsilon", "lane", "expert", "seed")}
    recording = record(arguments.run, arguments.steps, **options)
    write(recording, arguments.target)
    returns = recording.returns
    print(f"{arguments.target}: {recording.size:,} steps, {len(returns):,} episodes, mean return {returns.mean():.4g}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    import json

    from rljax.experiment import artifact, export

    folder = export(arguments.run, arguments.lane, arguments.target)
    print(folder)
    if (about := folder / "policy.json").exists():  # else a language model
        print(artifact.latency_text(json.loads(about.read_text(encoding="utf-8"))))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from rljax.experiment import replay

    episodes, differences = replay(arguments.trace)
    for line in differences:
        print(line)
    print(f"{episodes - len(differences)} of {episodes} episodes are the same, token for token")
    return 1 if differences else 0


def _fetch(arguments: argparse.Namespace) -> int:
    from rljax.experiment import InputError
    from rljax.lm.fetch import fetch

    try:
        print(fetch(arguments.model))
    except (ValueError, RuntimeError) as error:
        raise InputError(str(error)) from error
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from rljax.experiment import InputError, write_report

    try:
        print(write_report(arguments.runs, arguments.output))
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from error
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from rljax.experiment import InputError, compare

    try:
        comparison = compare(arguments.runs)
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from error
    print(comparison.text())
    if arguments.out is not None:
        try:
            print(f"\n{comparison.write(arguments.out)}")
        except OSError as error:
            raise InputError(f"--out: cannot write {arguments.out}: {error.strerror}") from error
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    import dataclasses

    from rljax.experiment import InputError, load_run, result, run, summary_text

    original = load_run(arguments.run)
    experiment = dataclasses.replace(original, out=arguments.out)
    if experiment.path.resolve() == Path(arguments.run).resolve():
        raise InputError("--out: the new run would overwrite the old one; name another directory")
    before = result(arguments.run, states=())
    if before.summary["status"] != "finished":
        raise InputError(f"{arguments.run} is not finished: `rljax run {arguments.run}` goes on")
    with _Progress() as progress:
        again = run(experiment, listener=progress, argv=["rljax", *sys.argv[1:]])
    print(summary_text(again.summary))
    before_rows, again_rows = ((r.path / "metrics.jsonl").read_bytes() for r in (before, again))
    if before_rows == again_rows:
        print("\nreproduced: metrics.jsonl is the same, byte for byte")
    else:
        old, new = (r.summary["settings"] for r in (before, again))
        print("\nnot bit for bit the same (other versions or devices?); IQM before and now:")
        for a, b in zip(old, new, strict=True):
            scores = [["n/a" if s[key] is None else f"{s[key]:.2f}" for key in ("iqm", "low", "high")] for s in (a, b)]
            print(f"  {a['label']}: {' and '.join(f'{iqm} [{low}, {high}]' for iqm, low, high in scores)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from rljax import extensions

    what = arguments.what

    def show(kind: str, names: Iterable[str], describe: Callable[[str], str]) -> None:
        """A line for each name, those of packages last; one that cannot be used says why, and the others are listed."""
        entries = extensions.entries(kind)
        for name in names:
            try:
                line = describe(name)
            except Exception as error:
                if name not in entries and not isinstance(error, ValueError):  # which one of ours raises over another's
                    raise
                line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            source = f" ({', '.join(map(extensions.package, entries[name]))})" if name in entries else ""
            print(f"  {name:<31}{line}{source}")

    if what in (None, "envs"):
        from rljax.envs import env_names, gymnax, make_env, space_text

        def spaces(name: str) -> str:
            if name == "text":
                return "prompts of a file, answers graded on the host"
            if name.startswith("brax/"):  # it takes seconds a model, so its sizes are left out
                return "brax, continuous actions in [-1, 1], backends generalized spring positional mjx"
            env = make_env(name)
            return f"observations {space_text(env.observation_space)}, actions {space_text(env.action_space)}"

        print("environments (env = ...)")
        show("environment", env_names(), spaces)
        for name, why in gymnax.EXCLUDED.items():
            print(f"  ({name} is left out: it {why})")
        print("  gymnasium/<id>                 any of Gymnasium's, as gymnasium/LunarLander-v3, on the host")
        print("  module:attribute               your own, also path/to/file.py:attribute")
    if what in (None, "agents"):
        from rljax.agents import agent_module, agent_names

        print("agents (algo.name = ...)")
        show("agent", agent_names(), lambda name: (agent_module(name).__doc__ or "").partition("\n")[0])
    if what in (None, "graders"):
        from rljax.lm.graders import grader_keys, grader_types

        print("graders (env_params.grader = { type = ... }), and their keys")
        show("grader", grader_types(), lambda name: ", ".join(grader_keys(name)))
    if what in (None, "configs"):
        from rljax.experiment import InputError, load

        print("configs under this directory")
        for path in sorted(Path().glob("experiments/**/*.toml")):
            try:
                e = load(path)
            except InputError as error:
                print(f"  {path!s:<40}{error}")
                continue
            swept = f", sweeps {', '.join(e.sweep)}" if e.sweep else ""
            print(f"  {path!s:<40}{e.algo_name} on {e.env}, {e.total_steps:,} steps, {len(e.seeds)} seeds{swept}")
    return 0


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _Terminated:
    """Whether SIGTERM has come; the run stops after its chunk, in place of dying on the spot."""

    def __enter__(self) -> "_Terminated":
        self._came = False
        self._is_main = threading.current_thread() is threading.main_thread()  # others get no signals
        if self._is_main:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._is_main:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: Any) -> None:
        self._came = True

    def __call__(self) -> bool:
        return self._came


class _Progress:
    """Prints the events of a run: a bar with steps/s and ETA on a terminal, a plain line per evaluation elsewhere."""

    def __init__(self):
        from rich.console import Console

        self._console = Console()
        self._bar: Any = None
        self._began = time.perf_counter()
        self._resumed_at = 0

    def __enter__(self) -> "_Progress":
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(bar_width=28), TextColumn("{task.percentage:>3.0f}%  {task.description}"), TextColumn("ETA"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("compiling", total=None)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        print(text, flush=True) if self._bar is None else self._bar.console.print(text, highlight=False, markup=False)

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "note":
            self._print(event["text"])
        elif kind == "compile" and self._bar is None:
            self._print("compiling")
        elif kind == "start":
            e, p = event["experiment"], event["program"]
            self._began, self._resumed_at = time.perf_counter(), event["resumed_at"]
            resumed = f", resumed at step {self._resumed_at:,}" if self._resumed_at > p.steps_at(0) else ""
            lanes, devices = (f"{n} {word}{'s' * (n > 1)}" for n, word in ((p.num_lanes, "lane"), (p.mesh.size, "device")))
            self._print(f"{e.algo_name} on {e.env}: {lanes} on {devices}{resumed}\n{event['path']}")
        elif kind == "chunk":
            self._chunk(event)

    def _chunk(self, event: dict[str, Any]) -> None:
        step, total = event["step"], event["total"]
        elapsed = time.perf_counter() - self._began
        eta = elapsed * (total - step) / max(step - self._resumed_at, 1)
        speed = f"{event['steps_per_second']:,.0f} steps/s over all lanes"
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=step, description=f"{step:,}/{total:,}  {speed}")
        if event["evaluation"] is not None:
            dead = {failure["lane"] for failure in event["failed"]}
            dead |= set(range(len(event["evaluation"].returns))) - set(event["left"])
            known = [r[r == r] for lane, r in enumerate(event["evaluation"].returns) if lane not in dead]  # NaN is not itself
            means = [r.mean() if r.size else float("nan") for r in known]
            spread = f"{sum(means) / len(means):9.2f}  ({min(means):.2f} .. {max(means):.2f})" if means else "every lane failed"
            text = f"{step:>12,}/{total:,}  return {spread}"
            self._print(
                text + self._language(event["totals"], dead) + (f"  {speed}  ETA {_duration(eta)}" if self._bar is None else "")
            )

    @staticmethod
    def _language(totals: dict[str, Any], dead: set[int]) -> str:
        """What must be watched together with the return, of episodes in groups or on a leash: means over the lanes that live."""

        def mean(name: str) -> float:
            pairs = [(s, n) for lane, (s, n) in enumerate(zip(*totals[name], strict=True)) if lane not in dead and n]
            return sum(s / n for s, n in pairs) / len(pairs) if pairs else float("nan")

        if not totals or not {"flat_groups", "kl_reference/episode"} & set(totals):
            return ""
        spread = max(mean("episode/return_square") - mean("episode/return") ** 2, 0.0) ** 0.5
        kl = f"  KL {mean('kl_reference/episode'):.3f}" if "kl_reference/episode" in totals else ""
        flat = f"  flat {mean('flat_groups'):.0%}" if "flat_groups" in totals else ""
        return (
            f"  sampled {mean('episode/return'):.2f} +- {spread:.2f}{kl}  entropy {mean('entropy'):.2f}"
            f"  length {mean('episode/length'):.1f}{flat}"
        )
