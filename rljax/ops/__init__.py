"""Pure arithmetic on arrays; imports nothing else of ours."""

from rljax.ops import bandits, dataset, groups, kl, losses, normalization, ope, replay, returns, schedules

__all__ = ["bandits", "dataset", "groups", "kl", "losses", "normalization", "ope", "replay", "returns", "schedules"]
