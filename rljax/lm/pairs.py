"""Preference pairs from a file: which of two completions of a prompt is the better one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.lm.graders import load_jsonl
from rljax.options import did_you_mean

KEYS = ("prompt", "messages", "chosen", "rejected", "margin")


def load_pairs(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file: ``prompt`` or ``messages``, ``chosen``, ``rejected``, and ``margin``, how much better, if known.

    A side is text, or a list of the one message of the assistant. Each row gets its ``place`` in the file.

    Raises:
      ValueError: what is wrong, with the file, the number of the line and the key: an unknown key, a side that is missing, empty
        or no text, sides that are equal, a margin that is no number from 1e-6 to 1e6.
    """

    def check(row: dict[str, Any], place: str) -> dict[str, Any]:
        for key in row:
            if key not in KEYS:
                raise ValueError(f"{place}: unknown key {key}{did_you_mean(key, list(KEYS))}; a pair has {', '.join(KEYS)}")
        sides = {key: _text(row[key]) for key in ("chosen", "rejected")}
        for key, side in sides.items():
            if side is None:
                raise ValueError(
                    f"{place}: {key} must be text, or a list of one message of the assistant, got {str(row[key])[:60]}"
                )
            if not side.strip():
                raise ValueError(f"{place}: {key} is empty")
        if sides["chosen"] == sides["rejected"]:
            raise ValueError(f"{place}: chosen and rejected are the same, which says nothing: take the line out")
        margin = row.get("margin", 1.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 1e-6 <= margin <= 1e6:
            raise ValueError(f"{place}: margin must be a number from 1e-6 to 1e6, got {str(margin)[:60]}")
        return {**row, **sides, "margin": float(margin), "place": place}

    return load_jsonl(path, required=("chosen", "rejected"), each=check)


def _text(side: Any) -> str | None:
    if isinstance(side, list) and len(side) == 1 and isinstance(side[0], Mapping) and side[0].get("role") == "assistant":
        side = side[0].get("content")
    return side if isinstance(side, str) else None


def encode_pairs(
    rows: Sequence[Mapping[str, Any]], prompts: list[list[int]], tokenizer: Any, prompt_length: int, max_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(chosen int32 [N, S], rejected int32 [N, S], margin float32 [N])``: contexts, prompts padded at their left with -1 and
    completions, which end in the end token, at their right.

    Args:
      prompts: their tokens.

    Raises:
      ValueError: a prompt or completion that is too long, or holds an end token, with its place in the file.
    """
    sides = [np.full((len(rows), prompt_length + max_tokens), -1, np.int32) for _ in range(2)]
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        if len(prompt) > prompt_length:
            raise ValueError(
                f"{row['place']}: the prompt has {len(prompt)} tokens, and the longest of env_params.file {prompt_length}: "
                "leave the line out, or put its prompt into that file too"
            )
        for key, contexts in zip(("chosen", "rejected"), sides, strict=True):
            try:
                said = [*tokenizer.encode(row[key], bos=False), tokenizer.eos_ids[0]]
            except (TypeError, ValueError) as error:
                raise ValueError(f"{row['place']}: {key} cannot be tokenized: {error}") from error
            if not set(tokenizer.eos_ids).isdisjoint(said[:-1]):
                raise ValueError(f"{row['place']}: {key} holds an end token, which is added to every side: leave it out")
            if len(said) > max_tokens:
                raise ValueError(
                    f"{row['place']}: {key} has {len(said)} tokens with its end, more than env_params.max_tokens ({max_tokens})"
                )
            contexts[i, prompt_length - len(prompt) : prompt_length] = prompt
            contexts[i, prompt_length : prompt_length + len(said)] = said
    return sides[0], sides[1], np.asarray([row["margin"] for row in rows], np.float32)
