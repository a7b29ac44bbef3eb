"""Trains a policy with layers of 256 units on made-up experience; says on stderr how long an update takes."""

import argparse
import statistics
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=20)
parser.add_argument("--batch", type=int, default=256)
args = parser.parse_args()

torch.manual_seed(0)
policy = torch.nn.Sequential(
    torch.nn.Linear(8, 256),
    torch.nn.Tanh(),
    torch.nn.Linear(256, 256),
    torch.nn.Tanh(),
    torch.nn.Linear(256, 4),
)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
observations = torch.randn(args.batch, 8)
actions = torch.randint(0, 4, (args.batch,))
advantages = torch.randn(args.batch)
seconds = []
for _ in range(args.updates):
    started = time.perf_counter()
    chosen = torch.log_softmax(policy(observations), dim=1).gather(1, actions.unsqueeze(1)).squeeze(1)
    loss = -(chosen * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    seconds.append(time.perf_counter() - started)
print(f"loss {loss.item():.4f}")
print(f"seconds per update {statistics.median(seconds[1:] or seconds):.6f}", file=sys.stderr)
