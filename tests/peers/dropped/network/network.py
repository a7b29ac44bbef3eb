"""A few training steps of a small network, and an error that is caught."""

import torch

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
data = torch.randn(64, 4)
for _ in range(20):
    loss = (network(data).sum(1) - data.prod(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.6f}")
try:
    network(torch.ones(3))
except RuntimeError as error:
    print(str(error).splitlines()[0])
