"""Algorithms: one file each, read top to bottom."""

from rljax.agents.base import AGENTS, Agent, agent_module, agent_names, make_agent

__all__ = ["AGENTS", "Agent", "agent_module", "agent_names", "make_agent"]
