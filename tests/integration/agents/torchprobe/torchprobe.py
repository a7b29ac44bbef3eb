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
def flood(threads="8"):
    """Read one byte of every absent run of libtorch_cpu.so, in random order, from several threads at once.

    Prints how many there were, and a digest of all bytes of the library's code as this process sees them.
    """
    import ctypes
    import hashlib
    import random
    import re
    import threading

    runs, whole = [], []
    with open("/proc/self/maps") as file:
        for line in file:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (---|r-x)p ([0-9a-f]+) .*/libtorch_cpu\.so$", line)
            if match:
                start, stop = (int(match.group(n), 16) for n in (1, 2))
                whole.append((int(match.group(4), 16), start, stop))
                if match.group(3) == "---":
                    runs += range(start, stop, 1 << 16)
    everything = runs * 2
    random.Random(0).shuffle(everything)

    def touch(part):
        for address in part:
            ctypes.string_at(address, 1)

    workers = [
        threading.Thread(target=touch, args=(everything[n :: int(threads)],)) for n in range(int(threads))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    digest = hashlib.sha256()
    for _, start, stop in sorted(whole):
        digest.update(ctypes.string_at(start, stop - start))
    print(len(everything) > 2000, digest.hexdigest())


@check
def waits():
    """Say that it is up; do what no trace did once told to."""
    print("ready", flush=True)
    sys.stdin.readline()
    untraced()


@check
def nonsense():
    """Flood the pager with requests that make no sense, then need it."""
    import socket

    def ask(data):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect("/run/rvbundle/pager")
            connection.sendall(data)
            connection.settimeout(5)
            try:
                return connection.recv(1000)
            except ConnectionError:
                return b""

    library = b"usr/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"
    for number in range(300):
        for body in (
            b"\0" + (1 << 40).to_bytes(8, "little") + b"\0" + library,
            b"\0" + bytes(9) + b"../../../etc/passwd",
            b"\0" + bytes(9) + b"etc/ld.so.preload",
            b"\0",
            b"\xff" * 100,
            number.to_bytes(2, "little") * 50,
        ):
            answer = ask(len(body).to_bytes(4, "little") + body)
            assert answer[0] in (1, 2), answer
        assert ask(b"\xff\xff\xff\x7f") == b""
    print(torch.linalg.svd(torch.eye(2))[1].tolist())


@check
def children():
    """Run what no trace used in children of every kind."""
    import multiprocessing
    import os
    import subprocess

    code = "import torch; print(torch.linalg.svd(torch.eye(3))[1].tolist())"
    print(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    empty = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    print(empty.stdout.strip())
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(convolved, [1, 2]))
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], {}, file_actions=actions)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as file:
        print(file.read().strip())


def convolved(number):
    """Do something that no trace did."""
    return torch.nn.functional.conv2d(torch.full((1, 1, 3, 3), float(number)), torch.ones(1, 1, 3, 3)).item()


@check
def handlers():
    """Code that no trace used, under handlers and masks of the program's own."""
    import faulthandler
    import signal

    faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    print(torch.linalg.svd(torch.eye(2))[1].tolist())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(signal.Signals))
    seen = []

    def on_usr1(number, frame):
        seen.append(torch.fft.fft(torch.ones(4)).abs().sum().item())

    signal.signal(signal.SIGUSR1, on_usr1)
    signal.raise_signal(signal.SIGUSR1)
    print(seen)


@check
def crash():
    """A fault of the agent's own."""
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(8, 1)


@check
def metadata():
    """What importlib.metadata and torch say of themselves."""
    import importlib.metadata

    print(importlib.metadata.version("torch").split("+")[0], torch.__version__.split("+")[0])
    print(bool(importlib.metadata.files("numpy")), "gymnasium" in importlib.metadata.packages_distributions())


if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
