"""The Python API on one page: train, read the results, act with a trained policy, train without files.

    python experiments/run.py
    python experiments/run.py --total-steps 20000 --algo.learning-rate 3e-4

Takes the overrides that `rljax run` takes.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

import rljax
from rljax.experiment import load, parse_overrides, run, summary_text, train

CONFIG = Path(__file__).parent / "ppo_cartpole.toml"


def main() -> None:
    # A config is a file and overrides, by their dotted keys; `load` validates both and fills in every default.
    experiment = load(CONFIG, {"seeds": [0, 1, 2, 3, 4], **parse_overrides(sys.argv[1:])})

    # Trains every lane, a lane being one seed (and one choice of swept values), in one program. Files go to
    # `experiment.path`. The same call resumes a run that was killed, and reads the files of one that has finished.
    result = run(experiment)
    print(summary_text(result.summary))

    # Results are arrays with an axis of lanes: [lanes, evaluations].
    print("\nsteps     ", *result.eval_steps[-5:])
    for lane, returns in zip(result.lanes, result.eval_returns, strict=True):
        print(f"seed {lane['seed']:<6}", *np.round(returns[-5:], 1))
    best = int(result.eval_returns[:, -1].argmax())

    # One trained lane, taken out and acted with. Policies act on batches of time steps: here of one.
    agent, state = result.policy(best)
    env = rljax.make_env(experiment.env, **experiment.env_params)
    step = jax.jit(env.step)
    act = jax.jit(lambda state, carry, timestep, key: agent.act(state, carry, timestep, key, True))
    key = jax.random.key(0)
    env_state, timestep = env.reset(key)
    batch = jax.tree.map(lambda x: x[None], timestep)
    carry, episode_return = agent.start(state, batch), 0.0
    for t in range(1000):
        act_key, env_key = jax.random.split(jax.random.fold_in(key, t))
        carry, action = act(state, carry, batch, act_key)
        env_state, timestep = step(env_key, env_state, action[0])
        batch = jax.tree.map(lambda x: x[None], timestep)
        episode_return += float(timestep.reward)
        if timestep.done:
            break
    print(f"\none episode of seed {result.lanes[best]['seed']}: return {episode_return:.1f}")

    # The whole training as one program, with no files, no checkpoints and no host in the loop: here of 16 seeds.
    many = dataclasses.replace(experiment, seeds=tuple(range(16)))
    states, metrics, evaluation = train(many)
    entropy = np.asarray(metrics["entropy"])  # [lanes, chunks]
    print(f"\n16 seeds: {np.asarray(evaluation.returns).mean(1).round(1)}")
    print(f"entropy from {entropy[:, 0].mean():.3f} to {entropy[:, -1].mean():.3f}, {states.updates[0]} updates each")


if __name__ == "__main__":
    main()
