"""Draws docs/mdp.png: one episode of a language model that calls a tool, as the environment plays it.

    python benchmarks/mdp.py

The numbers in the drawing are fields of the time steps that `tokens/multiplication` gives, not typed in by hand.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

import rljax
from rljax.envs.tokens import Problem, TokenEnvironment

PROMPT, CALL, ANSWER, TOO_LONG = "3*4?", "[3*4]", "=12", "0000000"
COLOURS = {"prompt": "#e3e3e3", "policy": "#cfe0f7", "tool": "#fbd9b0", "stop": "#c9e8c9", "cut": "#f3c6c6"}
ROWS = ("legal actions before it", "reward", "terminated", "truncated", 'info["forced"]')


@dataclasses.dataclass(frozen=True)
class Token:
    """One action and what the environment made of it; ``cells`` are in the order of `ROWS`."""

    text: str
    kind: str
    cells: tuple[str, ...]


def play(env: TokenEnvironment, words: str, stops: bool) -> list[Token]:
    """What the policy says, with the tool's answers where the environment forces them."""
    pad = [-1] * (env.task.prompt_length - len(PROMPT))
    problem = Problem(jnp.array(pad + env.tokenizer.encode(PROMPT)), jnp.array([*env.tokenizer.encode("12"), -1, -1]))
    state, timestep = env.pose(problem)
    step = jax.jit(env.step)
    todo = [*env.tokenizer.encode(words), *(env.tokenizer.eos_ids[:1] if stops else ())]
    tokens = []
    while not timestep.done:
        legal = int(timestep.action_mask.sum())
        action = int(timestep.action_mask.argmax()) if legal == 1 else todo.pop(0)
        state, timestep = step(jax.random.key(0), state, jnp.int32(action))
        is_stop = action in env.stop_tokens
        kind = "stop" if is_stop else "tool" if timestep.info["forced"] else "cut" if timestep.truncated else "policy"
        flags = (timestep.terminated, timestep.truncated, timestep.info["forced"])
        cells = (str(legal), f"{float(timestep.reward):g}", *("yes" if flag else "." for flag in flags))
        tokens.append(Token("end" if is_stop else env.tokenizer.decode([action]), kind, cells))
    assert not todo
    return tokens


def box(axes: Axes, x: float, y: float, text: str, kind: str) -> None:
    axes.add_patch(
        FancyBboxPatch((x - 0.4, y - 0.36), 0.8, 0.72, boxstyle="round,pad=0.03", facecolor=COLOURS[kind], edgecolor="#555")
    )
    axes.text(x, y, text, ha="center", va="center", family="monospace", fontsize=10 if len(text) > 1 else 13)


def strip(axes: Axes, tokens: list[Token], first: int, y: float) -> None:
    """Tokens from the number ``first`` on, with their cells below."""
    for number, token in enumerate(tokens[first:], first):
        box(axes, number + 4.5, y, token.text, token.kind)
        for row, cell in enumerate(token.cells):
            is_marked = cell not in (".", "0") and not (row == 0 and cell != "1")
            axes.text(
                number + 4.5,
                y - 0.85 - 0.5 * row,
                cell,
                ha="center",
                va="center",
                fontsize=9.5,
                color="black" if is_marked else "#777",
                weight="bold" if is_marked else "normal",
            )


def span(axes: Axes, left: float, right: float, y: float, text: str) -> None:
    axes.annotate(
        "",
        (left, y),
        (right, y),
        arrowprops={"arrowstyle": "|-|, widthA=0.25, widthB=0.25", "color": "#555", "shrinkA": 0, "shrinkB": 0},
    )
    axes.text((left + right) / 2, y + 0.2, text, ha="center", va="bottom", fontsize=9.5, linespacing=1.15)


def main() -> None:
    env = rljax.make_env("tokens/multiplication")
    assert isinstance(env, TokenEnvironment)
    ended, cut = play(env, CALL + ANSWER, stops=True), play(env, CALL + ANSWER + TOO_LONG, stops=False)
    call, reply, size = len(CALL), sum(token.kind == "tool" for token in ended), len(PROMPT)
    figure, axes = plt.subplots(figsize=(13, 5.6))
    for i, character in enumerate(PROMPT):
        box(axes, i + 0.5, 0, character, "prompt")
    strip(axes, ended, 0, 0)
    branch = len(ended) - 1  # the two episodes are the same up to here
    strip(axes, cut, branch, -4.3)
    for y in (0.0, -4.3):
        for row, name in enumerate(ROWS):
            x = 3.9 if y == 0 else branch + 3.9
            axes.text(x, y - 0.85 - 0.5 * row, name, ha="right", va="center", fontsize=9.5)
    span(axes, 0.1, size - 0.1, 0.6, "the prompt, in the observation\nof the first time step")
    span(axes, size + 0.1, size + call - 0.1, 0.6, "actions of the policy:\na call")
    span(axes, size + call + 0.1, size + call + reply - 0.1, 0.6, "forced by the tool:\nlog-probability 0,\nin no loss")
    span(axes, size + call + reply + 0.1, size + len(ended) - 1.1, 0.6, "actions of the\npolicy: an answer")
    span(axes, size + len(ended) - 0.9, size + len(ended) - 0.1, 0.6, "a stop\ntoken")
    end = (
        "At the end the verifier, or a grader, reads\nthe completion. The reward is the weighted\n"
        "sum of its components; reward/exact is 1."
    )
    goes_on = (
        f"The same policy goes on instead of stopping: after\n{env.max_tokens} tokens the limit cuts it, which is no end of\n"
        "the problem, and a cut completion earns 0."
    )
    axes.text(size + len(ended) + 0.25, 0.35, end, fontsize=9.5, va="top")
    axes.text(0.1, -4.05, goes_on, fontsize=9.5, va="top")
    axes.plot([size + branch] * 2, [-0.45, -3.9], color="#999", linestyle="--", linewidth=1)
    axes.set(xlim=(0, size + len(cut) + 0.2), ylim=(-7.4, 2.0))
    axes.axis("off")
    figure.savefig(Path(__file__).parent.parent / "docs" / "mdp.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
