"""Are the kernels right? What torch and numpy compute, against references in pure Python.

The references are exact: the inputs have 24 bits, so a product has 48 and fits a float, and math.fsum rounds
only once. No BLAS, numpy or torch takes part in them. A result passes if each of its elements is within what
rounding explains: |fl(xᵀy) − xᵀy| ≤ γ_n |x|ᵀ|y| with γ_n = n u / (1 − n u), whatever the order of the sum
(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 3.1 and 3.5). Errors are
given as a share of that bound: 1 is the most that rounding can do. The inputs are the same everywhere.
"""

from __future__ import annotations

import math
import random
from array import array
from copy import copy
from operator import add, mul, sub, truediv
from typing import Any, Callable, Iterator, Sequence

Matrix = Sequence[Sequence[float]]
Cases = Iterator["tuple[str, float]"]  # what was computed, and its error as a share of the bound

UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
# To what matmuls round float32 inputs first if they are allowed to (torch's fp32_precision).
REDUCED = {"float32": 0.0, "tf32": 2.0**-11, "bf16": 2.0**-8}
# m, k, n: below, at and beyond the edges of kernels that work on blocks of 4 to 64 rows and columns.
SIZES = ((1, 1, 1), (2, 3, 5), (1, 128, 31), (17, 33, 65), (64, 64, 64), (129, 70, 97), (192, 16, 160))
SYRK_SIZES = ((5, 3), (33, 17), (64, 64), (97, 70))
CHOLESKY_SIZES = (1, 5, 33, 97)
SPOILED_SIZES = ((17, 33, 65), (32, 64, 48))
_REPEATS = 3  # uninitialised registers and memory differ from call to call (OpenBLAS issue 5408)
_MANY = 5000  # elements of a result; larger ones are computed in fewer ways
# Winograd's method is not bounded element by element; its errors are several times those of the direct one.
_WINOGRAD = 8.0


def gamma(n: int, unit: float) -> float:
    """Return γ_n, the bound on the relative error of n roundings to a unit roundoff `unit`."""
    return n * unit / (1 - n * unit)


def growth(n: int, dtype: str, precision: str = "float32") -> float:
    """Return the bound on the error of a sum of n products, relative to |x|ᵀ|y|.

    `precision`: to what the inputs of type float32 are rounded first, a key of REDUCED.
    """
    own = gamma(n, UNIT[dtype])
    reduced = REDUCED[precision] if dtype == "float32" else 0.0
    return (1 + reduced) ** 2 * (1 + own) - 1 if reduced else own


def matrix(rows: int, columns: int, seed: int) -> list[list[float]]:
    """Return a matrix of numbers in [-1, 1] that fit float32, the same for a seed everywhere."""
    generator = random.Random(seed)
    return [array("f", (generator.uniform(-1, 1) for _ in range(columns))).tolist() for _ in range(rows)]


def transposed(rows: Matrix) -> list[list[float]]:
    """Return the transposed matrix."""
    return [list(column) for column in zip(*rows)]


class Product:
    """A matrix product: each element's exact value and the sum of its terms' sizes, row by row."""

    def __init__(self, a: Matrix, b: Matrix) -> None:
        """Multiply `a` by `b`, given by rows."""
        columns = list(zip(*b))
        magnitudes = [[abs(x) for x in column] for column in columns]
        self.a, self.b, self.columns, self.terms = a, b, len(columns), len(b)
        self.exact = [math.fsum(map(mul, row, column)) for row in a for column in columns]
        self.size = [sum(map(mul, row, c)) for row in ([abs(x) for x in r] for r in a) for c in magnitudes]

    def plus(self, bias: Sequence[float]) -> Product:
        """Return this product with `bias` added to each row."""
        new = copy(self)
        new.exact = list(map(add, self.exact, [*bias] * len(self.a)))
        new.size = list(map(add, self.size, [abs(x) for x in bias] * len(self.a)))
        new.terms = self.terms + 2  # the bias, and the reference's own rounding of this sum
        return new

    @property
    def name(self) -> str:
        """The sizes, as in 2x3x5."""
        return f"{len(self.a)}x{len(self.b)}x{self.columns}"


def worst(values: Sequence[float], exact: Sequence[float], size: Sequence[float], bound: float) -> float:
    """Return the largest |value − exact| / (bound · size); infinity if a value is NaN or one is missing."""
    if len(values) != len(exact):
        return math.inf
    errors = list(map(truediv, map(abs, map(sub, values, exact)), size))
    return math.inf if math.isnan(sum(errors)) else max(errors) / bound


def settle(name: str, cases: Cases) -> dict[str, Any]:
    """Return a check's result: the worst of its cases. What is raised is a failure, told in its text."""
    largest, where, count = -1.0, "", 0
    try:
        for where_now, error in cases:
            count += 1
            if error > largest:
                largest, where = error, where_now
    except Exception as error:  # noqa: BLE001 whatever a kernel's caller raises, the check has failed
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {"check": f"{name}: {text}", "error": None, "bound": 1.0, "passed": False}
    if not count:
        return {"check": f"{name}: nothing was checked", "error": None, "bound": 1.0, "passed": False}
    return {
        "check": f"{name}, worst at {where}",
        "error": largest if math.isfinite(largest) else None,
        "bound": 1.0,
        "passed": largest <= 1.0,
    }


class Torch:
    """What the checks need of torch."""

    name = "torch"

    def __init__(self) -> None:
        """Import it."""
        import torch

        self.module = torch

    def quiet(self) -> Any:
        """Return a context in which NaN is no error: in torch, any."""
        return self.module.no_grad()

    def vector(self, values: Sequence[float], dtype: str) -> Any:
        """Return a tensor of one dimension, in memory of its own."""
        code = {"float32": "f", "float64": "d"}[dtype]
        return self.module.frombuffer(array(code, values), dtype=getattr(self.module, dtype)).clone()

    def filled(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        """Return a tensor full of one value."""
        return self.module.full(shape, value, dtype=getattr(self.module, dtype), device="cpu")

    def ways(self, many: bool) -> dict[str, Callable[..., Any]]:
        """Return the ways to multiply two matrices, by name; the results have any number of copies."""
        torch = self.module
        found = {"mm": torch.mm, "mm into memory full of NaN": self._into}
        return found if many else {**found, "bmm": lambda a, b: torch.bmm(*map(self._twice, (a, b)))}

    def times(self, a: Any, x: Any) -> Any:
        """Return matrix times vector."""
        return self.module.mv(a, x)

    def cholesky(self, a: Any) -> Any:
        """Return the lower factor."""
        return self.module.linalg.cholesky(a)

    def _twice(self, a: Any) -> Any:
        return a.unsqueeze(0).expand(2, *a.shape)

    def _into(self, a: Any, b: Any) -> Any:
        out = self.module.full((a.shape[0], b.shape[1]), math.nan, dtype=a.dtype, device="cpu")
        return self.module.mm(a, b, out=out)


class Numpy:
    """What the checks need of numpy."""

    name = "numpy"

    def __init__(self) -> None:
        """Import it."""
        import numpy

        self.module = numpy

    def quiet(self) -> Any:
        """Return a context in which NaN is no error, whatever the agent has set."""
        return self.module.errstate(all="ignore")

    def vector(self, values: Sequence[float], dtype: str) -> Any:
        """Return an array of one dimension, in memory of its own."""
        return self.module.array(values, dtype=dtype)

    def filled(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        """Return an array full of one value."""
        return self.module.full(shape, value, dtype=dtype)

    def ways(self, _many: bool) -> dict[str, Callable[..., Any]]:
        """Return the ways to multiply two matrices, by name."""
        return {"@": self.module.matmul, "@ into memory full of NaN": self._into}

    def times(self, a: Any, x: Any) -> Any:
        """Return matrix times vector."""
        return a @ x

    def cholesky(self, a: Any) -> Any:
        """Return the lower factor."""
        return self.module.linalg.cholesky(a)

    def _into(self, a: Any, b: Any) -> Any:
        return self.module.matmul(a, b, out=self.module.full((a.shape[0], b.shape[1]), math.nan, a.dtype))


def plain(library: Any, rows: Matrix, dtype: str) -> Any:
    """Return a matrix whose rows lie one after the other."""
    return library.vector([x for row in rows for x in row], dtype).reshape(len(rows), len(rows[0]))


def turned(library: Any, rows: Matrix, dtype: str) -> Any:
    """Return the same matrix with its columns one after the other in memory."""
    return plain(library, transposed(rows), dtype).T


def spread(library: Any, rows: Matrix, dtype: str) -> Any:
    """Return the same matrix as a view of every other element of a larger one, which holds NaN elsewhere."""
    larger = library.filled((2 * len(rows), 2 * len(rows[0])), math.nan, dtype)
    view = larger[::2, ::2]
    view[:] = plain(library, rows, dtype)
    return view


LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "": (plain, plain),
    ", A transposed": (turned, plain),
    ", B transposed": (plain, turned),
    ", both transposed": (turned, turned),
    ", strided views": (spread, spread),
}
_FOR_SMALL = (", A transposed", ", both transposed")


def flat(result: Any) -> list[float]:
    """Return a result's elements as Python's numbers, row by row."""
    values: list[float] = result.reshape(-1).tolist()
    return values


def _dirty(library: Any, count: int, dtype: str) -> None:
    """Leave NaN in the memory that the next result of this size is likely to get."""
    library.filled((max(count, 1),), math.nan, dtype)


def _gemm(library: Any, dtype: str, products: Sequence[Product], precision: str) -> Cases:
    for product in products:
        bound = growth(product.terms, dtype, precision)
        count = len(product.exact)
        for layout, (left, right) in LAYOUTS.items():
            a, b = left(library, product.a, dtype), right(library, product.b, dtype)
            many = count > _MANY
            if many and layout in _FOR_SMALL:
                continue
            for way, multiply in library.ways(many).items():
                for _ in range(1 if many else _REPEATS):
                    _dirty(library, count, dtype)
                    values = flat(multiply(a, b))
                    for at in range(0, max(len(values), 1), count):
                        part = values[at : at + count]
                        error = worst(part, product.exact, product.size, bound)
                        yield f"{way} {product.name}{layout}", error


def _gemv(library: Any, dtype: str, products: Sequence[Product], precision: str) -> Cases:
    for product in products:
        bound = growth(product.terms, dtype, precision)
        for layout, (left, right) in LAYOUTS.items():
            # One column as a matrix, so that it can be strided as well.
            x = right(library, product.b, dtype)[:, 0]
            a = left(library, product.a, dtype)
            for _ in range(_REPEATS):
                _dirty(library, len(product.exact), dtype)
                error = worst(flat(library.times(a, x)), product.exact, product.size, bound)
                yield f"{product.name}{layout}", error


def _syrk(library: Any, dtype: str, products: Sequence[Product], precision: str) -> Cases:
    """A Aᵀ from one array: numpy calls syrk for it."""
    for product in products:
        bound = growth(product.terms, dtype, precision)
        for layout, make in (("A Aᵀ", plain), ("Aᵀ A", turned)):
            a = make(library, product.a, dtype)
            for _ in range(_REPEATS):
                _dirty(library, len(product.exact), dtype)
                # For the second the memory holds Aᵀ, and A is its transposed view.
                error = worst(flat(a @ a.T), product.exact, product.size, bound)
                yield f"{layout} {product.name}", error


def _cholesky(library: Any, dtype: str, matrices: Sequence[Matrix], _precision: str) -> Cases:
    """|L Lᵀ − A| ≤ γ_{n+1} |L||Lᵀ| (Higham, theorem 10.3); the part above the diagonal is zero.

    One more rounding is that of L Lᵀ as it is computed here.
    """
    for rows in matrices:
        n = len(rows)
        values = flat(library.cholesky(plain(library, rows, dtype)))
        lower = [values[at * n : at * n + at + 1] for at in range(n)]
        above = sum(abs(values[row * n + column]) for row in range(n) for column in range(row + 1, n))
        yield f"{n}x{n} above the diagonal", math.inf if above or math.isnan(above) else 0.0
        magnitude = [[abs(x) for x in row] for row in lower]
        pairs = [(i, j) for i in range(n) for j in range(i + 1)]
        exact = [math.fsum(map(mul, lower[i], lower[j])) for i, j in pairs]
        size = [sum(map(mul, magnitude[i], magnitude[j])) for i, j in pairs]
        yield f"{n}x{n}", worst([rows[i][j] for i, j in pairs], exact, size, gamma(n + 2, UNIT[dtype]))


def spoiled_rows(values: Sequence[float], product: Product, row: int, nan: bool, bound: float) -> float:
    """Return the error of a product one row of which can't be finite: infinity if that is not so."""
    start, end = row * product.columns, (row + 1) * product.columns
    bad = math.isnan if nan else (lambda x: not math.isfinite(x))
    if len(values) != len(product.exact) or not all(map(bad, values[start:end])):
        return math.inf
    rest = [[*kept[:start], *kept[end:]] for kept in (values, product.exact, product.size)]
    return worst(rest[0], rest[1], rest[2], bound)


def by_columns(values: Sequence[float], columns: int) -> list[float]:
    """Return the elements of a matrix column by column, given row by row."""
    return [x for at in range(columns) for x in values[at::columns]]


def _spoiled(library: Any, dtype: str, products: Sequence[Product], precision: str) -> Cases:
    """One NaN or infinity in a row of A: that row of A B is spoiled, and no other; A x likewise.

    In a column of B: that column is, and no other. A kernel has rows and columns in registers of their own.
    """
    for product in products:
        bound = growth(product.terms, dtype, precision)
        rows, inner, columns = len(product.a), len(product.b), product.columns
        single = Product(product.a, [[row[0]] for row in product.b])
        other = copy(product)
        other.columns = rows
        other.exact, other.size = by_columns(product.exact, columns), by_columns(product.size, columns)
        a, b = plain(library, product.a, dtype), plain(library, product.b, dtype)
        for value, share in ((math.nan, 0.0), (math.inf, 0.5), (math.nan, 1.0), (-math.inf, 1.0)):
            at, nan = int(share * (rows - 1)), math.isnan(value)
            for layout, make in (("", plain), (", A transposed", turned)):
                spoiled = make(library, _with(product.a, at, (7 * at) % inner, value), dtype)
                text = f"{value} in row {at} of A, {product.name}{layout}"
                for way, multiply in library.ways(True).items():
                    yield f"{way}, {text}", spoiled_rows(flat(multiply(spoiled, b)), product, at, nan, bound)
                found = flat(library.times(spoiled, b[:, 0]))
                yield f"times vector, {text}", spoiled_rows(found, single, at, nan, bound)
            at = int(share * (columns - 1))
            for layout, make in (("", plain), (", B transposed", turned)):
                spoiled = make(library, _with(product.b, (7 * at) % inner, at, value), dtype)
                text = f"{value} in column {at} of B, {product.name}{layout}"
                for way, multiply in library.ways(True).items():
                    values = by_columns(flat(multiply(a, spoiled)), columns)
                    yield f"{way}, {text}", spoiled_rows(values, other, at, nan, bound)


def _with(rows: Matrix, row: int, column: int, value: float) -> list[list[float]]:
    """Return a copy with one element replaced."""
    changed = [list(r) for r in rows]
    changed[row][column] = value
    return changed


def _linear(library: Any, dtype: str, products: Sequence[Product], precision: str) -> Cases:
    """Bias and product in one, as torch.nn.Linear does it."""
    torch = library.module
    for product in products:
        bias = matrix(1, product.columns, 11)[0]
        right = product.plus(bias)
        added = library.vector(bias, dtype)
        bound = growth(right.terms, dtype, precision)
        a = plain(library, product.a, dtype)
        for layout, make in (("", plain), (", B transposed", turned)):
            b = make(library, product.b, dtype)
            for _ in range(_REPEATS):
                _dirty(library, len(right.exact), dtype)
                values = flat(torch.addmm(added, a, b))
                yield f"{product.name}{layout}", worst(values, right.exact, right.size, bound)


def patches(image: Sequence[Matrix], kernel: int, stride: int, padding: int) -> list[list[float]]:
    """Return what a kernel sees at each place of an image (channels of rows), row by row, zeros around."""
    height, width = len(image[0]), len(image[0][0])

    def at(channel: Matrix, y: int, x: int) -> float:
        return channel[y][x] if 0 <= y < height and 0 <= x < width else 0.0

    ys = range(-padding, height + padding - kernel + 1, stride)
    xs = range(-padding, width + padding - kernel + 1, stride)
    square = [(dy, dx) for dy in range(kernel) for dx in range(kernel)]
    return [[at(channel, y + dy, x + dx) for channel in image for dy, dx in square] for y in ys for x in xs]


def _conv2d(library: Any, dtype: str, _products: Sequence[Product], precision: str) -> Cases:
    torch = library.module
    for batch, channels, filters, side, kernel, stride, padding, allowance in (
        (2, 3, 5, 12, 4, 2, 0, 1.0),
        (2, 4, 16, 20, 8, 4, 0, 1.0),
        (2, 2, 3, 7, 3, 1, 1, _WINOGRAD),
        (1, 2, 3, 7, 3, 1, 1, _WINOGRAD),  # too small for oneDNN: torch's own, by way of a matrix product
    ):
        images = [[matrix(side, side, 100 + 10 * n + c) for c in range(channels)] for n in range(batch)]
        weights = matrix(filters, channels * kernel * kernel, 5)
        bias = matrix(1, filters, 6)[0]
        seen = [patch for image in images for patch in patches(image, kernel, stride, padding)]
        right = Product(seen, transposed(weights)).plus(bias)
        x = library.vector([v for image in images for c in image for row in c for v in row], dtype)
        x = x.reshape(batch, channels, side, side)
        w = library.vector([v for row in weights for v in row], dtype)
        w = w.reshape(filters, channels, kernel, kernel)
        for layout in ("contiguous_format", "channels_last"):
            given = [t.contiguous(memory_format=getattr(torch, layout)) for t in (x, w)]
            for _ in range(_REPEATS):
                _dirty(library, len(right.exact), dtype)
                made = torch.nn.functional.conv2d(
                    given[0], given[1], library.vector(bias, dtype), stride=stride, padding=padding
                )
                values = flat(made.permute(0, 2, 3, 1))
                bound = allowance * growth(right.terms, dtype, precision)
                error = worst(values, right.exact, right.size, bound)
                yield f"{batch}x{channels}x{side}x{side}, {filters} of {kernel}x{kernel}, {layout}", error


class Estimated:
    """A matrix with a bound on the error of each element that a computation in float32 may have made."""

    def __init__(self, rows: Matrix, errors: Matrix | None = None) -> None:
        """Take the exact elements; without `errors` they are as they should be."""
        self.rows = rows
        self.errors = errors if errors is not None else [[0.0] * len(row) for row in rows]

    def times(self, other: Estimated, precision: str, bias: Sequence[float] = ()) -> Estimated:
        """Return the product (plus `bias` for each row)."""
        exact = Product(self.rows, other.rows)
        largest = Product(self._largest(), other._largest())
        if bias:
            exact, largest = exact.plus(bias), largest.plus([abs(x) for x in bias])
        bound = growth(exact.terms, "float32", precision)
        errors = [(1 + bound) * most - size for most, size in zip(largest.exact, exact.size)]
        width = exact.columns
        return Estimated(_rows(exact.exact, width), _rows(errors, width))

    def turned(self) -> Estimated:
        """Return the transposed matrix."""
        return Estimated(transposed(self.rows), transposed(self.errors))

    def _largest(self) -> list[list[float]]:
        return [[abs(x) + e for x, e in zip(row, errors)] for row, errors in zip(self.rows, self.errors)]


def _rows(values: Sequence[float], width: int) -> list[list[float]]:
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


_TANH = 4 * UNIT["float32"]  # vector libraries keep within 1 unit in the last place; some leave more room


def tanh_of(a: Estimated) -> Estimated:
    """Return tanh of each element: its slope is at most 1, so an error does not grow."""
    return Estimated(
        [[math.tanh(x) for x in row] for row in a.rows],
        [[e + _TANH for e in errors] for errors in a.errors],
    )


def back_through_tanh(gradient: Estimated, h: Estimated) -> Estimated:
    """Return g (1 − h²) for each element; |h| ≤ 1: 1 − h² is off by 2 e + e² and four roundings at most."""
    rows, errors = [], []
    for gs, ges, hs, hes in zip(gradient.rows, gradient.errors, h.rows, h.errors):
        slope = [1 - x * x for x in hs]
        off = [2 * e + e * e + 4 * UNIT["float32"] for e in hes]
        rows.append([g * s for g, s in zip(gs, slope)])
        errors.append([ge * (s + o) + abs(g) * o for g, ge, s, o in zip(gs, ges, slope, off)])
    return Estimated(rows, errors)


def _mlp(library: Any, _dtype: str, _products: Sequence[Product], precision: str) -> Cases:
    """Outputs and gradients of two layers with tanh between, errors propagated through each step."""
    torch = library.module
    batch, size, hidden, outputs = 17, 24, 20, 5
    x, w1, w2 = matrix(batch, size, 21), matrix(hidden, size, 22), matrix(outputs, hidden, 23)
    b1, b2, g = matrix(1, hidden, 24)[0], matrix(1, outputs, 25)[0], matrix(batch, outputs, 26)
    h = tanh_of(Estimated(x).times(Estimated(transposed(w1)), precision, b1))
    y = h.times(Estimated(transposed(w2)), precision, b2)
    given = Estimated(g)
    back = back_through_tanh(given.times(Estimated(w2), precision), h)
    ones = Estimated([[1.0] * batch])
    expected = {
        "output": y,
        "gradient of the second weights": given.turned().times(h, precision),
        "gradient of the second bias": ones.times(given, precision),
        "gradient of the first weights": back.turned().times(Estimated(x), precision),
        "gradient of the first bias": ones.times(back, precision),
        "gradient of the input": back.times(Estimated(w1), precision),
    }
    for _ in range(_REPEATS):
        leaves = [plain(library, rows, "float32").requires_grad_() for rows in (x, w1, w2, [b1], [b2])]
        with torch.enable_grad():
            middle = torch.tanh(torch.nn.functional.linear(leaves[0], leaves[1], leaves[3].reshape(-1)))
            out = torch.nn.functional.linear(middle, leaves[2], leaves[4].reshape(-1))
            out.backward(plain(library, g, "float32"))
        grads = [leaves[at].grad for at in (2, 4, 1, 3, 0)]
        for (name, right), found in zip(expected.items(), [out.detach(), *grads]):
            exact = [v for row in right.rows for v in row]
            yield name, worst(flat(found), exact, [e for row in right.errors for e in row], 1.0)


def _symmetric(n: int) -> list[list[float]]:
    """Return A Aᵀ + n I, rounded to float32; A has few columns, as its product is computed here."""
    a = matrix(n, 8, 7 * n)
    exact = Product(a, transposed(a)).exact
    rows = _rows(array("f", exact).tolist(), n)
    for at, row in enumerate(rows):
        row[at] += float(n)
        rows[at] = array("f", row).tolist()
    return rows


def _unusable(name: str, error: Exception) -> dict[str, Any]:
    text = " ".join(f"import {name}: {type(error).__name__}: {error}".split())[:300]
    return {"check": text, "error": None, "bound": 1.0, "passed": False}


def gate(
    modules: Sequence[str], precision: str = "float32", convolution: bool = True
) -> list[dict[str, Any]]:
    """Check the kernels of those of torch and numpy that are in `modules`.

    `precision`: to what torch's products may round float32 inputs, "float32" (not at all), "tf32" or "bf16".
    `convolution`: whether to check those as well.
    One that is not installed is left out; one whose import fails otherwise is a failed check.
    Returns a dict for each check: "check" (text), "error" (share of the bound, None if there is none),
    "bound" (1) and "passed". Never raises for what a kernel does.
    """
    used = [kind for kind in (Torch, Numpy) if kind.name in modules]
    if not used:
        return []
    products = [Product(matrix(m, k, at), matrix(k, n, at + 50)) for at, (m, k, n) in enumerate(SIZES, 1)]
    vectors = [Product(p.a, [[row[0]] for row in p.b]) for p in products]
    squares = [matrix(n, k, 3 * n + k) for n, k in SYRK_SIZES]
    symmetric = [Product(a, transposed(a)) for a in squares]
    positive = [_symmetric(n) for n in CHOLESKY_SIZES]
    spoiled = [Product(matrix(m, k, 7), matrix(k, n, 8)) for m, k, n in SPOILED_SIZES]
    checks: list[tuple[str, Callable[..., Cases], Sequence[Any]]] = [
        ("matrix times matrix", _gemm, products),
        ("matrix times vector", _gemv, vectors),
        ("matrix times itself", _syrk, symmetric),
        ("Cholesky", _cholesky, positive),
        ("NaN and infinity stay in their row or column", _spoiled, spoiled),
    ]
    only_torch: list[tuple[str, Callable[..., Cases], Sequence[Any]]] = [
        ("addmm", _linear, products),
        *([("conv2d", _conv2d, ())] if convolution else []),
    ]
    results = []
    for kind in used:
        try:
            library = kind()
        except ModuleNotFoundError as error:
            if error.name == kind.name:
                continue  # it is not in this payload: nothing of it can be wrong
            results.append(_unusable(kind.name, error))
            continue
        except Exception as error:  # noqa: BLE001 a library that can't be imported has failed
            results.append(_unusable(kind.name, error))
            continue
        reduced = precision if kind is Torch else "float32"
        for dtype in UNIT:
            for name, cases, material in checks + (only_torch if kind is Torch else []):
                text = f"{kind.name} {dtype}: {name}"
                with library.quiet():
                    results.append(settle(text, cases(library, dtype, material, reduced)))
        if kind is Torch:
            results.append(
                settle("torch float32: two layers, backward", _mlp(library, "float32", (), reduced))
            )
    return results
