"""A random policy on CartPole-v1: the baseline that every learning agent has to beat.

In every step an action is drawn from a uniform categorical distribution, whatever the
observation is. PyTorch does the drawing, so that this agent needs the same libraries as the
two learning agents beside it, which replace the uniform distribution by a trained one.

    python play.py --episodes 100

CartPole-v1 (Barto, Sutton & Anderson 1983) gives a reward of 1 for every step in which the pole
stands, for at most 500 steps; a random policy keeps it up for about 22 steps.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import gymnasium as gym
import torch
from torch.distributions import Categorical


def play_episode(env: gym.Env, policy: Categorical) -> float:
    """Play one episode with actions drawn from `policy` and return the sum of its rewards."""
    total = 0.0
    env.reset()
    done = False
    while not done:
        _, reward, terminated, truncated, _ = env.step(int(policy.sample()))
        total += float(reward)
        done = terminated or truncated
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Random policy on CartPole-v1.")
    parser.add_argument("--episodes", type=int, default=100, help="episodes to play")
    parser.add_argument("--seed", type=int, default=0, help="seed of environment and policy")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for rewards.csv")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    env = gym.make("CartPole-v1")
    env.reset(seed=args.seed)
    policy = Categorical(logits=torch.zeros(env.action_space.n))  # type: ignore[attr-defined]

    rewards: list[float] = []
    for episode in range(1, args.episodes + 1):
        rewards.append(play_episode(env, policy))
        print(f"episode {episode:4d}  reward {rewards[-1]:5.1f}", flush=True)
    env.close()
    if rewards:
        total = sum(rewards)
        print(f"total reward {total:.1f} in {len(rewards)} episodes, mean {total / len(rewards):.2f}")

    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "rewards.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["episode", "reward"])
        writer.writerows(enumerate(rewards, start=1))


if __name__ == "__main__":
    main()
