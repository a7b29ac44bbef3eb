"""How long the kernels take that an agent's layers need: seconds per call, for torch or for numpy alone."""

from __future__ import annotations

import random
import sys
import time
from typing import Any, Callable, Sequence

# What tells candidates apart if the agent has no layers of its own: wide enough that the kernel counts.
GEMM = (256, 256, 256)
GEMV = (256, 256)
LAYERS = ((64, 64, 1),)  # in, out, batch
# channels in and out, kernel height and width, strides, image height and width with padding, batch: the
# first layer of the usual network for Atari games (Mnih et al. 2015)
CONVOLUTIONS = ((4, 32, 8, 8, 4, 4, 84, 84, 1),)
_SLICE = 0.15  # seconds for one kernel, if there is enough time for all
_BATCHES = 7
_LEAST_BATCHES = 3


def median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def seconds_per_call(
    call: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median of several batches of calls that take about `seconds` together, per call.

    A first call is not counted. If one call takes longer than that, the next one is the figure.
    """
    call()
    start = clock()
    call()
    once = max(clock() - start, 1e-9)
    if once > seconds:
        return once
    count = max(1, int(seconds / _BATCHES / once))
    deadline = clock() + seconds
    taken: list[float] = []
    while len(taken) < _LEAST_BATCHES or (clock() < deadline and len(taken) < 4 * _BATCHES):
        start = clock()
        for _ in range(count):
            call()
        taken.append((clock() - start) / count)
    return median(taken)


def chain(layers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return layers that follow each other as (in, out), each taking what the one before it gives.

    It starts with the first layer that no other one feeds, at the most frequent batch; a head that nothing
    follows ends it. Layers that do not fit are left out.
    """
    if not layers:
        return []
    batch = layers[0][2]
    left = [(int(x[0]), int(x[1])) for x in layers if x[2] == batch]
    fed = [x for x in left if not any(y[1] == x[0] for y in left if y != x)]
    found = [(fed or left)[0]]
    left.remove(found[0])
    while True:
        following = [x for x in left if x[0] == found[-1][1]]
        if not following:
            return found
        # What leads on first: a network's two heads fit behind the same layer, hidden ones before both.
        following.sort(key=lambda x: not any(y[0] == x[1] for y in left if y != x))
        found.append(following[0])
        left.remove(following[0])


def kernels(
    modules: Sequence[str],
    layers: Sequence[Sequence[int]],
    convolutions: Sequence[Sequence[int]],
    seconds: float,
    report: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time the kernels within about `seconds`; return [{"name": text, "seconds": per call}, …].

    `layers`: (in, out, batch) each; `convolutions`: as CONVOLUTIONS. `report` is given what there is after
    each kernel. Kernels that there was no time for are left out; one that fails has "seconds" None.
    """
    if "torch" in modules and _installed("torch"):
        calls = _torch(layers or LAYERS, convolutions or ([] if layers else CONVOLUTIONS))
    elif "numpy" in modules and _installed("numpy"):
        calls = _numpy(layers or LAYERS)
    else:
        return []
    found: list[dict[str, Any]] = []
    deadline = time.perf_counter() + seconds
    each = min(_SLICE, seconds / len(calls) / 1.5)  # the rest is for first calls
    for name, make in calls:
        if time.perf_counter() > deadline:
            break
        try:
            found.append({"name": name, "seconds": seconds_per_call(make(), each)})
        except Exception as error:  # noqa: BLE001 a kernel that fails is no reason to time no other one
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            found.append({"name": f"{name}: {text}", "seconds": None})
        report(found)
    return found


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return name in sys.modules or find_spec(name) is not None


def _products(layers: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return m, k, n of the products, each once: batch, in, out of the layers with more than one row."""
    own = [(int(batch), int(width), int(out)) for width, out, batch in layers if batch > 1]
    return list(dict.fromkeys([GEMM, *own]))


def _vectors(layers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return list(
        dict.fromkeys([GEMV, *((int(out), int(width)) for width, out, batch in layers if batch == 1)])
    )


def _torch(
    layers: Sequence[Sequence[int]], convolutions: Sequence[Sequence[int]]
) -> list[tuple[str, Callable[[], Callable[[], Any]]]]:
    import torch

    generator = torch.Generator().manual_seed(1)  # the agent's own stays as it is

    def tensor(*shape: int) -> Any:
        return torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")

    def quiet(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                return call()

        return run

    def gemm(m: int, k: int, n: int) -> Callable[[], Any]:
        a, b = tensor(m, k), tensor(n, k).T  # weights lie transposed in a Linear
        return quiet(lambda: torch.mm(a, b))

    def gemv(m: int, n: int) -> Callable[[], Any]:
        a, bias, x = tensor(m, n).T, tensor(m), tensor(1, n)  # as a Linear does it for one row
        return quiet(lambda: torch.addmm(bias, x, a))

    def conv(channels: int, filters: int, kh: int, kw: int, sh: int, sw: int, h: int, w: int, n: int) -> Any:
        x, weights = tensor(n, channels, h, w), tensor(filters, channels, kh, kw)
        return quiet(lambda: torch.nn.functional.conv2d(x, weights, stride=(sh, sw)))

    def mlp(backward: bool) -> Callable[[], Any]:
        weights = [(tensor(out, width), tensor(out)) for width, out in sizes]
        x = tensor(rows, sizes[0][0])
        leaves = [leaf.requires_grad_(backward) for pair in weights for leaf in pair]

        def forward() -> Any:
            h = x
            for at, (weight, bias) in enumerate(weights):
                h = torch.nn.functional.linear(torch.tanh(h) if at else h, weight, bias)
            return h

        def both() -> None:
            with torch.enable_grad():
                forward().sum().backward()
            for leaf in leaves:
                leaf.grad = None

        return both if backward else quiet(forward)

    sizes, rows = chain(layers), int(layers[0][2])
    text = "-".join(map(str, [sizes[0][0], *(out for _, out in sizes)]))
    calls: list[Any] = [(f"gemm {m}x{k}x{n}", lambda s=(m, k, n): gemm(*s)) for m, k, n in _products(layers)]
    calls += [(f"gemv {m}x{n}", lambda s=(m, n): gemv(*s)) for m, n in _vectors(layers)]
    calls += [(convolution_name(c), lambda c=c: conv(*map(int, c))) for c in convolutions]
    calls.append((f"mlp {text} batch {rows} forward", lambda: mlp(False)))
    calls.append((f"mlp {text} batch {rows} forward and backward", lambda: mlp(True)))
    return calls


def convolution_name(sizes: Sequence[int]) -> str:
    """Return the name of a convolution, such as "conv2d 1x4x84x84, 32 of 8x8, stride 4x4"."""
    channels, filters, kh, kw, sh, sw, h, w, batch = map(int, sizes)
    return f"conv2d {batch}x{channels}x{h}x{w}, {filters} of {kh}x{kw}, stride {sh}x{sw}"


def _numpy(layers: Sequence[Sequence[int]]) -> list[tuple[str, Callable[[], Callable[[], Any]]]]:
    import numpy

    generator = random.Random(1)

    def tensor(*shape: int) -> Any:
        count = 1
        for extent in shape:
            count *= extent
        return numpy.array([generator.random() for _ in range(count)], numpy.float32).reshape(shape)

    def gemm(m: int, k: int, n: int) -> Callable[[], Any]:
        a, b = tensor(m, k), tensor(k, n)
        return lambda: a @ b

    def gemv(m: int, n: int) -> Callable[[], Any]:
        a, x = tensor(m, n), tensor(n)
        return lambda: a @ x

    calls: list[Any] = [(f"gemm {m}x{k}x{n}", lambda s=(m, k, n): gemm(*s)) for m, k, n in _products(layers)]
    calls += [(f"gemv {m}x{n}", lambda s=(m, n): gemv(*s)) for m, n in _vectors(layers)]
    return calls
