"""Experiments: the only place that knows of seeds, files, clocks and hosts."""

from rljax.experiment.checkpoint import SaveError
from rljax.experiment.comparison import Comparison, compare
from rljax.experiment.config import Experiment, InputError, load, parse_overrides
from rljax.experiment.data import Recording, load_data, read, together, write
from rljax.experiment.directory import is_finished
from rljax.experiment.evaluation import Evaluation, evaluate_agent
from rljax.experiment.programs import load_run, load_states
from rljax.experiment.redteam import RedTeam, red_team
from rljax.experiment.report import summary_text, write_report
from rljax.experiment.run import Stopped, plan, resume, run, train
from rljax.experiment.saved import Result, evaluate, export, picture, record, replay, result, sample_answers, trace

__all__ = [
    "Comparison",
    "Evaluation",
    "Experiment",
    "InputError",
    "Recording",
    "RedTeam",
    "Result",
    "SaveError",
    "Stopped",
    "compare",
    "evaluate",
    "evaluate_agent",
    "export",
    "is_finished",
    "load",
    "load_data",
    "load_run",
    "load_states",
    "parse_overrides",
    "picture",
    "plan",
    "read",
    "record",
    "red_team",
    "replay",
    "result",
    "resume",
    "run",
    "sample_answers",
    "summary_text",
    "together",
    "trace",
    "train",
    "write",
    "write_report",
]
