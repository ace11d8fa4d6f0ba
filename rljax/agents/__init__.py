"""Algorithms: one file each, read top to bottom."""

from rljax.agents.base import AGENTS, Agent, agent_module, make_agent

__all__ = ["AGENTS", "Agent", "agent_module", "make_agent"]
