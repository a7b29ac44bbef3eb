"""Multiplies matrices of 256 by 256 numbers, as numpy's BLAS does it."""

import numpy as np

random = np.random.RandomState(0)
a, b = random.rand(256, 256).astype("float32"), random.rand(256, 256).astype("float32")
for _ in range(10):
    c = a @ b
print(f"sum {c.sum():.0f}")
