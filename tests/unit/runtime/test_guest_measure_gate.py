"""The gate's references and bounds; with torch and numpy it is run in tests/integration/test_measure.py."""

import importlib
import math
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from rvbundle_runtime.guest import measure_gate as g


def single(x: float) -> float:
    """Round to float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def gemm(a: g.Matrix, b: g.Matrix, factor: float = 1.0) -> list[float]:
    """Multiply with float32 rounding after each step, from the last term to the first."""
    values = []
    for row in a:
        for column in zip(*b, strict=True):
            total = 0.0
            for x, y in reversed(list(zip(row, column, strict=True))):
                total = single(total + single(x * y))
            values.append(single(factor * total))
    return values


@pytest.fixture
def product() -> g.Product:
    return g.Product(g.matrix(9, 40, 1), g.matrix(40, 7, 2))


def test_inputs_are_the_same_everywhere_and_fit_float32() -> None:
    rows = g.matrix(2, 2, 3)
    assert rows == g.matrix(2, 2, 3)
    assert rows != g.matrix(2, 2, 4)
    assert rows[0][0] == single(-0.5240707458162173)  # random.Random(3).uniform(-1, 1)
    assert all(x == single(x) for row in rows for x in row)


def test_the_reference_is_the_exact_product_rounded_once(product: g.Product) -> None:
    column = [row[6] for row in product.b]
    pairs = list(zip(product.a[8], column, strict=True))
    exact = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))
    assert product.exact[-1] == float(exact)
    assert product.size[-1] == pytest.approx(sum(abs(x * y) for x, y in pairs))
    assert product.name == "9x40x7"


def test_bounds() -> None:
    assert g.gamma(1, 2.0**-53) == pytest.approx(2.0**-53)
    assert g.gamma(100, 2.0**-24) == pytest.approx(100 * 2.0**-24, rel=1e-4)
    assert g.growth(100, "float32") == g.gamma(100, 2.0**-24)
    assert g.growth(1, "float32", "bf16") == pytest.approx(2 * 2.0**-8, rel=1e-2)
    assert g.growth(1, "float32", "tf32") < g.growth(1, "float32", "bf16")
    assert g.growth(100, "float64", "bf16") == g.gamma(100, 2.0**-53)


def test_rounding_passes_and_a_thousandth_does_not(product: g.Product) -> None:
    bound = g.growth(product.terms, "float32")
    right = g.worst(gemm(product.a, product.b), product.exact, product.size, bound)
    wrong = g.worst(gemm(product.a, product.b, 1.001), product.exact, product.size, bound)
    assert 0 < right <= 1
    assert wrong > 10
    assert g.worst(gemm(product.a, product.b), product.exact, product.size, g.growth(40, "float64")) > 1


def test_one_wrong_element_is_enough(product: g.Product) -> None:
    values = gemm(product.a, product.b)
    values[20] += 1e-3
    assert g.worst(values, product.exact, product.size, g.growth(40, "float32")) > 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 30, 62])
def test_what_is_no_number_is_no_result(product: g.Product, bad: float, at: int) -> None:
    values = gemm(product.a, product.b)
    values[at] = bad
    assert g.worst(values, product.exact, product.size, g.growth(40, "float32")) == math.inf


def test_a_result_of_another_size(product: g.Product) -> None:
    assert g.worst(product.exact[:-1], product.exact, product.size, 1.0) == math.inf
    assert g.worst([], product.exact, product.size, 1.0) == math.inf


def test_a_bias_is_added_to_each_row(product: g.Product) -> None:
    more = product.plus([1.0, -2.0, 0.0, 0.0, 0.0, 0.0, 4.0])
    assert more.exact[7] == product.exact[7] + 1.0
    assert more.exact[-1] == product.exact[-1] + 4.0
    assert more.size[1] == product.size[1] + 2.0
    assert more.terms == 42


def test_spoiled_rows(product: g.Product) -> None:
    values = gemm(product.a, product.b)
    row = slice(14, 21)
    bound = g.growth(40, "float32")
    spoiled = [*values]
    spoiled[row] = [math.nan] * 7
    assert g.spoiled_rows(spoiled, product, 2, True, bound) <= 1
    assert g.spoiled_rows(spoiled, product, 2, False, bound) <= 1  # infinity may give NaN
    assert g.spoiled_rows(spoiled, product, 3, True, bound) == math.inf  # another row is spoiled
    spoiled[row] = [math.inf] * 7
    assert g.spoiled_rows(spoiled, product, 2, False, bound) <= 1
    assert g.spoiled_rows(spoiled, product, 2, True, bound) == math.inf  # NaN has become something else
    assert g.spoiled_rows(values, product, 2, True, bound) == math.inf  # NaN was lost
    spoiled[0] = math.nan  # and it has leaked
    assert g.spoiled_rows(spoiled, product, 2, False, bound) == math.inf
    assert g.spoiled_rows([], product, 2, False, bound) == math.inf


def test_by_columns() -> None:
    assert g.by_columns([1, 2, 3, 4, 5, 6], 3) == [1, 4, 2, 5, 3, 6]
    assert g.by_columns([], 3) == []


def test_settle() -> None:
    assert g.settle("x", iter([("a", 0.5), ("b", 0.75), ("c", 0.1)])) == {
        "check": "x, worst at b",
        "error": 0.75,
        "bound": 1.0,
        "passed": True,
    }
    assert g.settle("x", iter([("a", 0.5), ("b", 1.5)]))["passed"] is False
    lost = g.settle("x", iter([("a", 0.5), ("b", math.inf)]))
    assert (lost["error"], lost["passed"]) == (None, False)
    assert g.settle("x", iter([]))["passed"] is False


def test_what_a_kernel_raises_is_a_failed_check() -> None:
    def cases() -> Iterator[tuple[str, float]]:
        yield "a", 0.5
        raise RuntimeError("could not\ncreate a primitive")

    assert g.settle("x", cases()) == {
        "check": "x: RuntimeError: could not create a primitive",
        "error": None,
        "bound": 1.0,
        "passed": False,
    }


def test_patches() -> None:
    image = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]]
    assert g.patches(image, 2, 1, 0) == [[1, 2, 4, 5], [2, 3, 5, 6], [4, 5, 7, 8], [5, 6, 8, 9]]
    assert g.patches(image, 3, 3, 1) == [[0, 0, 0, 0, 1, 2, 0, 4, 5]]
    assert g.patches([*image, *image], 3, 1, 0) == [[*range(1, 10), *range(1, 10)]]


def test_estimated_errors_contain_those_of_two_layers() -> None:
    x, w1, w2 = g.matrix(5, 6, 1), g.matrix(6, 7, 2), g.matrix(7, 3, 3)
    hidden = g.tanh_of(g.Estimated(x).times(g.Estimated(w1), "float32"))
    out = hidden.times(g.Estimated(w2), "float32")
    first = gemm(x, w1)
    middle = [[single(math.tanh(v)) for v in first[at : at + 7]] for at in range(0, 35, 7)]
    values = gemm(middle, w2)
    exact, errors = ([v for row in rows for v in row] for rows in (out.rows, out.errors))
    assert 0 < g.worst(values, exact, errors, 1.0) <= 1
    assert g.worst(gemm(middle, w2, 1.001), exact, errors, 1.0) > 1


def test_back_through_tanh_is_the_derivative() -> None:
    h = g.tanh_of(g.Estimated([[0.3, -1.2]]))
    back = g.back_through_tanh(g.Estimated([[2.0, 0.5]]), h)
    step = 1e-6
    for at, (x, gradient) in enumerate([(0.3, 2.0), (-1.2, 0.5)]):
        slope = (math.tanh(x + step) - math.tanh(x - step)) / (2 * step)
        assert back.rows[0][at] == pytest.approx(gradient * slope, rel=1e-6)


def test_nothing_to_check() -> None:
    assert g.gate([]) == []


def test_a_library_that_can_not_be_imported_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    (tmp_path / "numpy.py").write_text("raise ImportError('libscipy_openblas64_.so: cannot open')")
    (check,) = g.gate(["numpy"])
    assert check["passed"] is False
    assert check["check"] == "import numpy: ImportError: libscipy_openblas64_.so: cannot open"
    (tmp_path / "numpy.py").write_text("import no_such_module_of_numpys")
    importlib.invalidate_caches()
    (check,) = g.gate(["numpy"])
    assert "no_such_module_of_numpys" in check["check"]


def test_a_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    importlib.invalidate_caches()
    assert g.gate(["numpy"]) == []
