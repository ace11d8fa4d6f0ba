"""The token MDP: a language model's world under the same contract as CartPole.

The state is the prompt and everything said since, by the policy or by a tool; an action is the next token; the reward comes with
the last one. What may not be said is an action mask, and so is what must be: a token that the environment forces, such as a
tool's answer, has one legal action. Its log-probability is 0 whatever the policy, so no loss needs to know of it.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from rljax.envs.base import TimeStep, restart, transition
from rljax.envs.spaces import Discrete, Tokens


class Problem(struct.PyTreeNode):
    """One task instance.

    Attributes:
      prompt: int32 ``[prompt length]``, padded at its left with -1.
      answer: int32 ``[answer length]``, padded at its right with -1: the reference that a verifier compares with, or what it
        needs.
    """

    prompt: Array
    answer: Array


class Task(Protocol):
    """Where prompts and rewards come from; every function is pure and can be traced.

    Attributes:
      tokenizer: turns ids into text and back, on the host (`rljax.lm.tokenizer`).
      prompt_length: places of a prompt.
      max_tokens: the longest completion that the task calls for, the end token and what tools say included.
      components: names of the parts of the reward, in the order of `verify`.
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def components(self) -> tuple[str, ...]: ...

    def sample(self, key: Array) -> Problem: ...

    def demonstrate(self, key: Array, problem: Problem) -> Array:
        """What a good answer says, int32 ``[max_tokens]``, padded at its right with -1: end token included, a tool's words
        not."""
        ...

    def verify(self, problem: Problem, completion: Array, length: Array) -> Array:
        """float32 ``[components]`` for ``completion`` int32 ``[T]``, of which ``length`` tokens were said, without the end
        token."""
        ...


class Tool(Protocol):
    """Something that the policy can call by what it says.

    Attributes:
      max_tokens: the longest answer.
    """

    @property
    def max_tokens(self) -> int: ...

    def __call__(self, said: Array, length: Array) -> tuple[Array, Array]:
        """``(answer int32 [max_tokens], its length)`` to the first ``length`` tokens of ``said [T]``; length 0: no call ends
        there."""
        ...


class TokenState(struct.PyTreeNode):
    """State of `TokenEnvironment`.

    Attributes:
      problem: see `Problem`.
      context: int32 ``[S]``, prompt and what was said, -1 where nothing is.
      length: int32, tokens said so far, by policy and tools.
      stopped: int32, tokens that had been said when the first stop token was; 0 before.
      pending: int32 ``[R]``, what a tool still has to say, -1 after its end; None without a tool.
      automaton: state of the automaton; None without one.
      paid: float32, what the dense components have paid so far; None without any.
    """

    problem: Problem
    context: Array
    length: Array
    stopped: Array
    pending: Array | None
    automaton: Array | None
    paid: Array | None


class TokenEnvironment:
    """One conversation: a prompt, then tokens up to a stop token or ``max_tokens``.

    A stop token is an action like any other and ends the episode (``terminated``). Running out of tokens sets ``truncated``; what
    was said then counts as it stands where ``truncated_counts``, and earns 0 otherwise.

    A dense component pays as it comes: every token earns the weighted score after it less that before it. These differences add
    up to the score at the end, so the return of an episode is what it would be if all were paid there: a token that lowers the
    score gives back what was earned, and so does the last one of an episode that is cut and counts for 0.

    A task that grades on the host (`rljax.lm.text`) gives no reward in `step`: whoever plays whole episodes asks `outcome` for
    it.

    ``info`` holds, at the end of an episode, ``reward/<component>`` for each part of the reward, and at every step ``forced``:
    whether the token was the environment's.
    """

    def __init__(
        self,
        task: Task,
        *,
        weights: dict[str, Any] | None = None,
        dense: tuple[str, ...] = (),
        max_tokens: int | None = None,
        truncated_counts: bool = False,
        limit_terminates: bool = False,
        stop_tokens: tuple[int, ...] = (),
        tool: Tool | None = None,
        automaton: Any = None,
    ):
        """
        Args:
          task: prompts and rewards.
          weights: of the reward's components; 1 for each that is not named. Numbers may be traced.
          dense: components that pay at every token.
          max_tokens: the task's by default.
          truncated_counts: verify a completion that ran out of tokens too.
          limit_terminates: the limit is part of the MDP, and ends an episode as a stop token does: for agents that would else
            bootstrap from the value of a full context, which no step of theirs ever teaches them.
          stop_tokens: the tokenizer's end tokens by default.
          tool: see `Tool`.
          automaton: which tokens are legal after what was said, `rljax.lm.automata`.

        Raises:
          ValueError: a limit below 1, an unknown component, or a dense one that is graded on the host.
        """
        self.task = task
        self.tokenizer = task.tokenizer
        self.max_tokens = task.max_tokens if max_tokens is None else max_tokens
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"env_params.max_tokens must be a whole number, 1 or more, got {max_tokens!r}")
        weights = weights or {}
        for name in (*weights, *dense):
            if name not in task.components:
                raise ValueError(f"unknown reward component {name!r}; this task has {', '.join(task.components)}")
        self.weights = [weights.get(name, 1.0) for name in task.components]
        self.stop_tokens = tuple(stop_tokens or task.tokenizer.eos_ids)
        self.truncated_counts = truncated_counts
        self.limit_terminates = limit_terminates
        self.tool = tool
        self.automaton = automaton
        self._graded_by_host = hasattr(task, "grade")
        if dense and self._graded_by_host:
            raise ValueError(f"what is graded on the host is only known at the end, so {dense[0]!r} cannot be dense")
        self._dense = [name in dense for name in task.components]
        # What is only known at the end; see `_outcome`. None where `step` knows the reward.
        self.outcome = self._outcome if self._graded_by_host else None
        size = task.tokenizer.vocab_size
        self.observation_space = Tokens(size, task.prompt_length + self.max_tokens, task.prompt_length)
        self.action_space = Discrete(size)

    def reset(self, key: Array) -> tuple[TokenState, TimeStep]:
        return self.pose(self.task.sample(key))

    def pose(self, problem: Problem) -> tuple[TokenState, TimeStep]:
        """Starts a conversation with a given prompt."""
        context = jnp.concatenate([problem.prompt, jnp.full(self.max_tokens, -1, jnp.int32)])
        pending = None if self.tool is None else jnp.full(self.tool.max_tokens, -1, jnp.int32)
        automaton = None if self.automaton is None else self.automaton.start
        paid = jnp.zeros(()) if any(self._dense) else None
        state = TokenState(problem, context, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), pending, automaton, paid)
        info = self._info(jnp.zeros(len(self.task.components)), jnp.zeros((), bool))
        return state, restart(context, self._mask(state), info)

    def step(self, key: Array, state: TokenState, action: Array) -> tuple[TokenState, TimeStep]:
        del key
        prompt = self.task.prompt_length
        is_forced = jnp.zeros((), bool) if state.pending is None else state.pending[0] >= 0
        action = action.astype(jnp.int32)
        context = jax.lax.dynamic_update_index_in_dim(state.context, action, prompt + state.length, 0)
        length = state.length + 1
        said = context[prompt:]
        is_stop = ~is_forced & jnp.isin(action, jnp.asarray(self.stop_tokens, jnp.int32))
        pending = automaton = None
        if self.tool is not None and state.pending is not None:
            answer, size = self.tool(said, length)
            answer = jnp.where(jnp.arange(self.tool.max_tokens) < size, answer, -1)
            rest = jnp.concatenate([state.pending[1:], jnp.full(1, -1, jnp.int32)])
            pending = jnp.where(is_forced, rest, answer)
        if self.automaton is not None and state.automaton is not None:
            automaton = jnp.where(is_forced, state.automaton, self.automaton.advance(state.automaton, action))
        stopped = jnp.where(is_stop & (state.stopped == 0), length, state.stopped)
        is_cut = ~is_stop & (length >= self.max_tokens)
        terminated, truncated = (is_stop | is_cut, is_cut & False) if self.limit_terminates else (is_stop, is_cut)
        counts = is_stop | is_cut if self.truncated_counts else is_stop
        so_far = self.task.verify(state.problem, said, length - is_stop)
        scores = jnp.where(counts, so_far, 0.0)
        reward, paid = self._worth(scores, dense=False), None
        if state.paid is not None:
            paid = self._worth(jnp.where(is_stop | is_cut, scores, so_far), dense=True)
            reward = reward + paid - state.paid
        state = TokenState(state.problem, context, length, stopped, pending, automaton, paid)
        return state, transition(context, reward, terminated, truncated, self._mask(state), self._info(scores, is_forced))

    def _worth(self, scores: Array, dense: bool) -> Array:
        """Weighted sum of the components that are dense, or of the others."""
        total = jnp.zeros(())
        for weight, score, is_dense in zip(self.weights, scores, self._dense, strict=True):
            total = total + weight * score if is_dense == dense else total
        return total

    def _outcome(self, states: TokenState, lengths: Array) -> tuple[Array, dict[str, Array]]:
        """Reward float32 ``[B]`` and ``info`` of the last steps of episodes that took ``lengths [B]`` tokens, from their last
        states.

        A grader on the host is called once for all of them. ``info["valid"]`` is False where it could not grade; the reward is 0
        then, and means nothing.
        """
        said = states.context[:, self.task.prompt_length :]
        is_stop = states.stopped == lengths
        reward, scores, valid = self.task.grade(states.problem, said, lengths - is_stop)  # type: ignore[attr-defined]
        counts = is_stop | self.truncated_counts
        info = {f"reward/{name}": jnp.where(counts, scores[:, i], 0.0) for i, name in enumerate(self.task.components)}
        return jnp.where(counts, reward, 0.0), {**info, "valid": valid | ~counts}

    def demonstration(self, key: Array) -> tuple[TimeStep, Array, Array]:
        """An episode of good answers, for cloning: ``(timesteps [max_tokens + 1], actions int32 [max_tokens], mask bool
        [max_tokens])``.

        Words that a tool forces stand in their places; the mask is True where the policy has the word.
        """
        sample_key, answer_key = jax.random.split(key)
        problem = self.task.sample(sample_key)
        words = self.task.demonstrate(answer_key, problem)
        words = jnp.pad(words, (0, self.max_tokens), constant_values=-1)
        state, first = self.pose(problem)

        def say(loop, _):
            state, place, is_over = loop
            forced = jnp.int32(-1) if state.pending is None else state.pending[0]
            word = words[place]
            is_over = is_over | ((forced < 0) & (word < 0))
            token = jnp.where(forced >= 0, forced, jnp.maximum(word, 0))
            state, timestep = self.step(answer_key, state, token)
            loop = (state, place + (forced < 0), is_over | timestep.done)
            return loop, (timestep, token, ~is_over & (forced < 0))

        start = (state, jnp.zeros((), jnp.int32), jnp.zeros((), bool))
        _, (timesteps, actions, mask) = jax.lax.scan(say, start, length=self.max_tokens)
        return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, timesteps), actions, mask

    def _mask(self, state: TokenState) -> Array | None:
        if state.pending is None and self.automaton is None:
            return None
        ids = jnp.arange(self.action_space.n)
        legal = jnp.ones(ids.shape, bool) if self.automaton is None else self.automaton.mask(state.automaton)
        if state.pending is not None:
            legal = jnp.where(state.pending[0] >= 0, ids == state.pending[0], legal)
        return legal

    def _info(self, scores: Array, forced: Array) -> dict[str, Array]:
        info = {f"reward/{name}": scores[i] for i, name in enumerate(self.task.components)} | {"forced": forced}
        return {**info, "valid": jnp.ones((), bool)} if self._graded_by_host else info
