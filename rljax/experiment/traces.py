"""Traces: what a language model said, token for token, with what is needed to have it say the same again.

A trace is a file of JSON lines. The first names the run, the checkpoint, the number of episodes and the seed that they were drawn
with; each of the others is one episode. `replay` plays them again from the first line and says where they differ.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from rljax.agents import Agent
from rljax.agents.base import whole
from rljax.agents.on_policy import contexts, first_episodes
from rljax.envs import group

VERSION = 1


class Transcript(struct.PyTreeNode):
    """Episodes ``[N]`` of one lane.

    Attributes:
      context: int32 ``[N, S]``, prompt and completion, -1 where there is nothing or after the end.
      log_prob: float32 ``[N, T]``, the model's at its temperature.
      behaviour_log_prob: float32 ``[N, T]``, after top-k, top-p and min-p: of what was really drawn from.
      forced: bool ``[N, T]``, a tool's words.
      reward: float32 ``[N]``.
      components: float32 ``[N]`` each.
      terminated, truncated, valid: bool ``[N]``.
    """

    context: Array
    log_prob: Array
    behaviour_log_prob: Array
    forced: Array
    reward: Array
    components: dict[str, Array]
    terminated: Array
    truncated: Array
    valid: Array


def transcribe(
    agent: Agent, env: Any, state: Any, key: Array, episodes: int, greedy: bool, data: Any, samples: int = 1
) -> Transcript:
    """Plays ``samples`` episodes of a language model from each of ``episodes`` prompts of a `TokenEnvironment`. Pure.

    Those of a prompt are adjacent.
    """
    assert agent.policy is not None
    params = whole(state.params, data)
    played = first_episodes(agent.policy, group(env, episodes, samples), params, key, env.max_tokens, greedy)
    output = agent.policy.unroll(params, agent.policy.start(params, played.first), played.starts)
    mask, info = played.mask, played.transitions.info

    def at_last(x: Array) -> Array:
        return jnp.where(played.last, x, jnp.zeros_like(x)).sum(0)

    def said(x: Array) -> Array:
        return jnp.where(mask, x, 0.0).swapaxes(0, 1)

    return Transcript(
        context=contexts(played, env.observation_space),
        log_prob=said(output.distribution.log_prob(played.samples)),
        behaviour_log_prob=said(output.distribution.behaviour_log_prob(played.samples)),
        forced=(mask & info["forced"]).swapaxes(0, 1),
        reward=played.returns,
        components={name.removeprefix("reward/"): at_last(x) for name, x in info.items() if name.startswith("reward/")},
        terminated=at_last(played.transitions.terminated).astype(bool),
        truncated=at_last(played.transitions.truncated).astype(bool),
        valid=at_last(info["valid"]).astype(bool) if "valid" in info else jnp.ones(episodes * samples, bool),
    )


def rows(transcript: Transcript, env: Any, lanes: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """One dict an episode, of a `Transcript` whose leaves are numpy ``[lanes, N, ...]``."""
    prompt, tokenizer = env.task.prompt_length, env.tokenizer
    result = []
    for i, lane in enumerate(lanes):
        for j in range(transcript.reward.shape[1]):
            one = jax.tree.map(lambda x, i=i, j=j: x[i, j], transcript)
            before, said = ([int(t) for t in part if t >= 0] for part in (one.context[:prompt], one.context[prompt:]))
            size = len(said)
            result.append(
                {
                    "step": step,
                    **lane,
                    "episode": j,
                    "prompt": tokenizer.decode(before, special=True),
                    "completion": tokenizer.decode(said, special=True),
                    "reward": float(one.reward) if one.valid else None,
                    "components": {name: float(x) for name, x in one.components.items()},
                    "terminated": bool(one.terminated),
                    "truncated": bool(one.truncated),
                    "valid": bool(one.valid),
                    "prompt_tokens": before,
                    "tokens": said,
                    "forced": [int(k) for k in np.flatnonzero(one.forced[:size])],
                    "log_prob": [round(float(x), 5) for x in one.log_prob[:size]],
                    "behaviour_log_prob": [round(float(x), 5) for x in one.behaviour_log_prob[:size]],
                }
            )
    return result


def write(path: Path, head: dict[str, Any], episodes: list[dict[str, Any]]) -> None:
    """A trace file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"trace": VERSION, **head}, *episodes]))


def read(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``(head, episodes)`` of a trace file.

    Raises:
      ValueError: it is none.
    """
    try:
        head, *episodes = (json.loads(line) for line in Path(path).read_text().splitlines())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the trace {path}: {error}") from error
    if not isinstance(head, dict) or head.get("trace") != VERSION:
        raise ValueError(f"{path} is not a trace: its first line must say so; `rljax eval RUN --transcript 8` writes one")
    return head, episodes


def differences(before: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[str]:
    """One line for each episode whose tokens, reward or flags are not the same."""
    lines = []
    if len(before) != len(again):
        lines.append(f"{len(before)} episodes in the trace, {len(again)} now")
    for a, b in zip(before, again, strict=False):
        name = f"lane {a['lane']}, episode {a['episode']}"
        if a["prompt_tokens"] != b["prompt_tokens"]:
            lines.append(f"{name}: another prompt, {b['prompt']!r} for {a['prompt']!r}")
        elif a["tokens"] != b["tokens"]:
            at = next(
                (i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)) if x != y),
                min(len(a["tokens"]), len(b["tokens"])),
            )
            lines.append(f"{name}: differs from token {at} on, {b['completion']!r} for {a['completion']!r}")
        elif any(a[key] != b[key] for key in ("reward", "terminated", "truncated", "valid")):
            lines.append(f"{name}: the same tokens, but reward {b['reward']} for {a['reward']}")
    return lines
