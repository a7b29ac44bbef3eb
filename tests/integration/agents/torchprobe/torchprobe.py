"""Does one thing at a time with torch and gymnasium: what the tests want to see inside an image."""

import sys

import torch

CHECKS = {}


def check(function):
    """Make a function available by its name."""
    CHECKS[function.__name__] = function
    return function


def relu_or_zero(x: torch.Tensor, on: bool) -> torch.Tensor:
    """A function with a branch, for TorchScript to compile from its source."""
    if on:
        return torch.relu(x)
    return torch.zeros_like(x)


class Squares(torch.utils.data.Dataset):
    """The squares of 0 to 7."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


@check
def step():
    """One training step of a small network; the trace."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loss = network(torch.ones(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")


@check
def loader(method="fork"):
    """A DataLoader with two worker processes."""
    batches = torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=2, multiprocessing_context=method
    )
    print([batch.tolist() for batch in batches])


@check
def script():
    """TorchScript of a function of the agent, and of a module of torch (its source may be cold)."""
    own = torch.jit.script(relu_or_zero)
    print(own(torch.tensor([-1.0, 2.0]), True).tolist())
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 2)
    scripted = torch.jit.script(linear)
    print(torch.equal(scripted(torch.ones(1, 2)), linear(torch.ones(1, 2))))


@check
def environments():
    """Make environments that no trace made."""
    import gymnasium

    for name in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1"):
        env = gymnasium.make(name)
        env.reset(seed=0)
        env.action_space.seed(0)
        print(name, [float(env.step(env.action_space.sample())[1]) for _ in range(3)])


@check
def untraced():
    """Operations that no trace used."""
    torch.manual_seed(0)
    print(f"{torch.linalg.svdvals(torch.rand(4, 4)).sum().item():.5f}")
    print(f"{torch.nn.functional.conv2d(torch.rand(1, 1, 5, 5), torch.rand(1, 1, 3, 3)).sum().item():.5f}")
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        print("error", str(error).splitlines()[0][:30])


@check
def shared():
    """A tensor sent through a queue to a spawned process and back."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    worker = context.Process(target=double, args=(there, back))
    worker.start()
    there.put(torch.arange(4.0))
    print(back.get().tolist())
    there.put(None)  # only now may the process end that owns the answer's memory
    worker.join()


def double(there, back):
    """The other end of `shared`."""
    back.put(there.get() * 2)
    there.get()


@check
def metadata():
    """What importlib.metadata and torch say of themselves."""
    import importlib.metadata

    print(importlib.metadata.version("torch").split("+")[0], torch.__version__.split("+")[0])
    print(bool(importlib.metadata.files("numpy")), "gymnasium" in importlib.metadata.packages_distributions())


if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
