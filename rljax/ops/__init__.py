"""Pure arithmetic on arrays; imports nothing else of ours."""

from rljax.ops import dataset, groups, kl, losses, normalization, ope, replay, returns, schedules

__all__ = ["dataset", "groups", "kl", "losses", "normalization", "ope", "replay", "returns", "schedules"]
