"""Timing of kernels: how often they are called, and which layers follow each other."""

import pytest

from rvbundle_runtime.guest.measure_kernels import chain, convolution_name, kernels, median, seconds_per_call


class Clock:
    """A clock that moves when something is called."""

    def __init__(self, *steps: float) -> None:
        self.now, self.calls, self.steps = 0.0, 0, steps

    def __call__(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += self.steps[min(self.calls, len(self.steps) - 1)]
        self.calls += 1


def test_the_first_call_does_not_count() -> None:
    clock = Clock(1.0, 0.001)
    assert seconds_per_call(clock.call, 0.1, clock) == pytest.approx(0.001)
    assert clock.now < 1.0 + 0.15


def test_what_takes_long_is_called_twice() -> None:
    clock = Clock(2.0, 3.0)
    assert seconds_per_call(clock.call, 0.1, clock) == 3.0
    assert clock.calls == 2


def test_one_disturbed_batch_does_not_count() -> None:
    clock = Clock(*[0.001] * 20, 0.5, 0.001)
    assert seconds_per_call(clock.call, 0.1, clock) == pytest.approx(0.001)


def test_median() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([], []),
        ([(4, 64, 1)], [(4, 64)]),
        ([(4, 64, 1), (64, 64, 1), (64, 2, 1)], [(4, 64), (64, 64), (64, 2)]),
        ([(64, 2, 1), (64, 64, 1), (4, 64, 1)], [(4, 64), (64, 64), (64, 2)]),
        ([(4, 64, 1), (64, 2, 1), (64, 1, 1)], [(4, 64), (64, 2)]),  # two heads
        ([(4, 64, 1), (4, 64, 32), (64, 2, 1), (64, 2, 32)], [(4, 64), (64, 2)]),  # two batches
        ([(4, 64, 1), (32, 8, 1)], [(4, 64)]),
        ([(8, 8, 1)], [(8, 8)]),
        ([(4, 8, 1), (8, 4, 1)], [(4, 8), (8, 4)]),  # a circle
    ],
    ids=str,
)
def test_chain(layers: list[tuple[int, int, int]], expected: list[tuple[int, int]]) -> None:
    assert chain(layers) == expected


def test_names_of_convolutions() -> None:
    assert convolution_name([4, 32, 8, 8, 4, 4, 84, 84, 1]) == "conv2d 1x4x84x84, 32 of 8x8, stride 4x4"


def test_an_agent_without_numeric_libraries() -> None:
    assert kernels([], [], [], 1.0) == []
