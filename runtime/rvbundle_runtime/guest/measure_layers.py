"""Which layers of torch an agent's program uses, and how large they are."""

from __future__ import annotations

import sys
from typing import Any, Sequence

LAYERS_MAX = 8


class LayerWatch:
    """Counts the sizes of a program's layers, from when torch.nn is there (it is never imported for this)."""

    def __init__(self) -> None:
        """Start to wait for torch."""
        self._layers: dict[tuple[int, ...], int] = {}
        self._convolutions: dict[tuple[int, ...], int] = {}
        self._handle: Any = None
        sys.meta_path.insert(0, self)

    def find_spec(self, _name: str, _path: object = None, _target: object = None) -> None:
        """Find nothing: importlib asks here first, and torch imports more modules after torch.nn's."""
        register = getattr(
            sys.modules.get("torch.nn.modules.module"), "register_module_forward_pre_hook", None
        )
        if register is not None and self._handle is None:
            self._handle = register(self._see)
            sys.meta_path.remove(self)

    def stop(self) -> None:
        """Count no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def layers(self) -> list[list[int]]:
        """The sizes of Linear layers: [in, out, batch], the most frequent first."""
        return _most_frequent(self._layers)

    @property
    def convolutions(self) -> list[list[int]]:
        """The sizes of Conv2d: [channels in and out, kernel h, w, stride h, w, padded h, w, batch]."""
        return _most_frequent(self._convolutions)

    def _see(self, module: Any, inputs: Sequence[Any]) -> None:
        try:
            torch_nn = sys.modules["torch"].nn
            if not inputs:
                return
            shape = tuple(int(x) for x in inputs[0].shape)
            if isinstance(module, torch_nn.Linear):
                rows = 1
                for extent in shape[:-1]:
                    rows *= extent
                _count(self._layers, (module.in_features, module.out_features, rows))
            elif isinstance(module, torch_nn.Conv2d):
                sizes = convolution(module, shape)
                if sizes:
                    _count(self._convolutions, sizes)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return  # a layer with sizes that are no numbers: the agent can use it, this can't


def convolution(module: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a Conv2d's sizes as in LayerWatch.convolutions; None for what the kernels' times leave out."""
    if module.groups != 1 or tuple(module.dilation) != (1, 1) or isinstance(module.padding, str):
        return None
    batch, (height, width) = (shape[0] if len(shape) == 4 else 1), shape[-2:]
    padding = module.padding
    padded = (height + 2 * padding[0], width + 2 * padding[1])
    return (module.in_channels, module.out_channels, *module.kernel_size, *module.stride, *padded, batch)


def _count(counts: dict[tuple[int, ...], int], sizes: tuple[int, ...]) -> None:
    counts[sizes] = counts.get(sizes, 0) + 1


def _most_frequent(counts: dict[tuple[int, ...], int]) -> list[list[int]]:
    ordered = sorted(counts, key=lambda sizes: -counts[sizes])  # equal ones as they came: in the net's order
    return [list(sizes) for sizes in ordered[:LAYERS_MAX]]
