"""Runs inside a payload for `rvbundle tune`: times the agent's workload and kernels, and checks these.

    python measure.py REQUEST RESULT

Both are paths of JSON files (docs/backends.md has their keys). The result is written after each part, so
that a crash in a later one still tells how far it got. torch and numpy are imported only where the request
says that the agent has them.
"""

import gc
import json
import math
import operator
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time

# Unit roundoff, the largest relative error of one rounding: IEEE 754 binary32 and binary64, and bfloat16.
_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53, "bf16": 2.0**-8}
_TINY = 1e-30  # an absolute error below every bound that matters: keeps 0 / 0 away
_SEED = 20240229
# Rows, inner length, columns: the edges of blocked kernels, tails of every length, one size that fills them.
_SIZES = ((1, 1, 1), (2, 3, 5), (5, 64, 4), (17, 33, 65), (64, 64, 64), (129, 70, 97), (96, 16, 256))
_REPEATED = 3  # a kernel that reads what it did not write may be right the first time (OpenBLAS#5408)
_LAYERS_MAX, _ROWS_MAX = 8, 30
_ATARI = [1, 4, 84, 84, 32, 8, 4]  # the first layer for pictures: Mnih et al. 2015, Nature 518, 529
_CALLS_SECONDS = 0.02  # how long one batch of calls of a micro-kernel takes
_BATCHES = 5


# --- The correctness gate ---------------------------------------------------------------------------------


def _matrix(rand, rows, columns):
    return [[rand.uniform(-1.0, 1.0) for _ in range(columns)] for _ in range(rows)]


def _columns(matrix):
    return [list(column) for column in zip(*matrix)]


def _product(a, b):
    """Return the product of two matrices in double precision: by Python, no library has a part in it."""
    columns = _columns(b)
    return [[sum(map(operator.mul, row, column)) for column in columns] for row in a]


def _absolute(matrix):
    return [list(map(abs, row)) for row in matrix]


def gamma(n, roundoff):
    """Return n u / (1 - n u), by which sums of n products err: Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1."""
    return n * roundoff / (1.0 - n * roundoff)


class _Gate:
    """Collects checks: {"check", "error", "bound", "passed"}; an error is a share of what may be.

    `compare` False: kernels are called, and nothing is made of what they return (a build traces them so).
    """

    def __init__(self, compare):
        self.checks = []
        self.compare = compare

    def attempt(self, name, compute, error):
        """Add the error that `error` finds in what `compute` returns; a check that raises has failed."""
        try:
            found = compute()
            share = error(found) if self.compare else 0.0
        except Exception as raised:  # noqa: BLE001 whatever it is, the library could not do it
            name, share = "%s: %s: %s" % (name, type(raised).__name__, str(raised)[:200]), math.nan
        finite = math.isfinite(share)
        self.checks.append(
            {"check": name, "error": share if finite else None, "bound": 1.0, "passed": share <= 1.0}
        )


class _Reference:
    """The product of two matrices by plain Python, and the bound of each element's error.

    The componentwise bound of products, factor |a| |b| (Higham, section 3.5), does not depend on the order of
    summation, so that it holds for blocked kernels with any number of threads.
    """

    def __init__(self, a, b, factor, true=None):
        self.a, self.b, self.factor, self.true = a, b, factor, true
        self.scale = None

    def error(self, values):
        """Return the largest error of an element of `values`, as a share of its bound; NaN if one is NaN."""
        if self.scale is None:  # late: what is only called needs none of it
            self.true = self.true or _product(self.a, self.b)
            self.scale = _product(_absolute(self.a), _absolute(self.b))
        if [len(row) for row in values] != [len(row) for row in self.true]:
            return math.nan
        worst = 0.0
        for row, right, bounds in zip(values, self.true, self.scale):
            for value, true, bound in zip(row, right, bounds):
                error = abs(value - true) / (self.factor * bound + _TINY)
                if not error <= worst:
                    if error != error:
                        return error
                    worst = error
        return worst


def _factor(n, dtype, precision):
    """Return the factor of the bound for sums of n products of numbers that `dtype` holds.

    Where products take bfloat16, each factor is rounded to that first.
    """
    rounded = _ROUNDOFF["bf16"] if precision == "bf16" and dtype == "float32" else 0.0
    return gamma(n + 2, _ROUNDOFF[dtype]) + 2.0 * rounded + rounded * rounded


class _Numpy:
    """numpy's products, as the gate calls them."""

    name = "numpy"

    def __init__(self, dtype):
        import numpy

        numpy.seterr(all="ignore")  # NaN is meant
        self.np, self.dtype = numpy, getattr(numpy, dtype)

    def array(self, values):
        return self.np.array(values, dtype=self.dtype)

    def products(self):
        return {"gemm": self.np.matmul}

    def gemv(self, a, x):
        return a @ x

    def transposed(self, a):
        return a.T

    def strided(self, a):
        wide = self.np.zeros((a.shape[0], 2 * a.shape[1]), self.dtype)
        wide[:, ::2] = a
        return wide[:, ::2]

    def cholesky(self, a):
        return self.np.linalg.cholesky(a)


class _Torch:
    """torch's products, as the gate calls them."""

    name = "torch"

    def __init__(self, dtype):
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)

    def array(self, values):
        return self.torch.tensor(values, dtype=self.dtype)

    def products(self):
        torch = self.torch
        return {
            "gemm": torch.mm,
            "addmm": lambda a, b: torch.addmm(torch.zeros(b.shape[1], dtype=self.dtype), a, b),
            "bmm": lambda a, b: torch.bmm(a.unsqueeze(0), b.unsqueeze(0))[0],
        }

    def gemv(self, a, x):
        return self.torch.mv(a, x)

    def transposed(self, a):
        return a.t()

    def strided(self, a):
        wide = self.torch.zeros((a.shape[0], 2 * a.shape[1]), dtype=self.dtype)
        wide[:, ::2] = a
        return wide[:, ::2]

    def cholesky(self, a):
        return self.torch.linalg.cholesky(a)


def gate(modules, precision="float32", convolution=True, compare=True):
    """Return checks of the products, factorizations and gradients that agents are made of.

    `modules` are those of "torch" and "numpy" that are there; `precision` is "float32" or "bf16" (products
    of float32 matrices may then take bfloat16 inputs); `convolution`: that is checked as well. Without
    `compare`, kernels are called and no more.
    """
    found = _Gate(compare)
    for kind in (_Torch, _Numpy):
        if kind.name not in modules:
            continue
        for dtype in ("float32", "float64"):
            try:
                _Checks(found, kind(dtype), dtype, precision).all()
            except Exception as error:  # noqa: BLE001 a library that can't be called has failed
                found.attempt("%s %s: %s" % (kind.name, dtype, error), lambda: None, lambda _: math.nan)
    if "torch" in modules:
        _check_layers(found, precision, convolution)
    return found.checks


class _Checks:
    """The checks of one library's products in one type."""

    def __init__(self, found, library, dtype, precision):
        self.found, self.library, self.dtype, self.precision = found, library, dtype, precision
        self.random = random.Random(_SEED)

    def all(self):
        for rows, inner, columns in _SIZES:
            self.products(rows, inner, columns)
        for rows, inner in ((3, 2), (33, 70), (64, 64), (97, 130)):
            self.syrk(rows, inner)
            self.cholesky(rows)
        for special in (math.nan, math.inf):
            self.specials(5, 7, 6, special)
            self.specials(33, 64, 40, special)

    def label(self, what, *sizes):
        return "%s %s %s %s" % (self.library.name, what, self.dtype, "x".join(map(str, sizes)))

    def matrix(self, rows, columns):
        """Return a random matrix as the library has it, and as lists of what it holds: no error of input."""
        array = self.library.array(_matrix(self.random, rows, columns))
        return array, array.tolist()

    def products(self, rows, inner, columns):
        """Check a product of any kind, of operands that lie in memory in any way."""
        library = self.library
        (left, a), (right, b) = self.matrix(rows, inner), self.matrix(inner, columns)
        at, bt = library.array(_columns(a)), library.array(_columns(b))
        operands = (
            ("", left, right),
            (" transposed", library.transposed(at), library.transposed(bt)),
            (" strided", library.strided(left), library.strided(right)),
        )
        factor = _factor(inner, self.dtype, self.precision)
        reference = _Reference(a, b, factor)
        for what, product in library.products().items():
            for how, x, y in operands:
                name = self.label(what + how, rows, inner, columns)
                self.found.attempt(name, lambda f=product, x=x, y=y: f(x, y).tolist(), reference.error)
        column = [[row[0]] for row in b]
        vector = library.array([row[0] for row in b])
        reference = _Reference(a, column, factor)
        for how, m in (("", left), (" transposed", library.transposed(at))):
            for _ in range(_REPEATED):
                name = self.label("gemv" + how, rows, inner)
                self.found.attempt(name, lambda m=m: self.gemv(m, vector), reference.error)

    def gemv(self, a, x):
        """Return the product of matrix and vector as a matrix of one column."""
        return [[value] for value in self.library.gemv(a, x).tolist()]

    def syrk(self, rows, inner):
        """Check A At and At A, which libraries compute by their syrk where they see that it is one matrix."""
        array, a = self.matrix(rows, inner)
        transposed, at = self.library.transposed(array), _columns(a)
        product = self.library.products()["gemm"]
        for what, x, y, left, right in (
            ("A At", array, transposed, a, at),
            ("At A", transposed, array, at, a),
        ):
            reference = _Reference(left, right, _factor(len(right), self.dtype, self.precision))
            name = self.label("syrk " + what, rows, inner)
            self.found.attempt(name, lambda x=x, y=y: product(x, y).tolist(), reference.error)

    def cholesky(self, n):
        """Check L Lt: its error is at most gamma(n + 1) |L| |Lt| (Higham, theorem 10.3)."""
        matrix, a = self.matrix(n, n)
        symmetric = [[(a[i][j] + a[j][i]) / 4.0 + (n if i == j else 0.0) for j in range(n)] for i in range(n)]
        matrix = self.library.array(symmetric)
        true = matrix.tolist()

        def error(lower):
            upper = _columns(lower)
            reference = _Reference(lower, upper, gamma(n + 2, _ROUNDOFF[self.dtype]), true)
            return reference.error(_product(lower, upper))

        self.found.attempt(self.label("cholesky", n), lambda: self.library.cholesky(matrix).tolist(), error)

    def specials(self, rows, inner, columns, special):
        """NaN and infinity reach those elements that they must, and no others."""
        a, b = _matrix(self.random, rows, inner), _matrix(self.random, inner, columns)
        row = rows // 2
        a[row][inner // 3] = special
        left, right = self.library.array(a), self.library.array(b)
        vector = self.library.array([line[0] for line in b])
        product = self.library.products()["gemm"]

        def error(values):
            good = all(math.isfinite(v) is (n != row) for n, line in enumerate(values) for v in line)
            return 0.0 if good else math.inf

        name = self.label("gemm with %r" % special, rows, inner, columns)
        self.found.attempt(name, lambda: product(left, right).tolist(), error)
        self.found.attempt(
            self.label("gemv with %r" % special, rows, inner), lambda: self.gemv(left, vector), error
        )


def _check_layers(found, precision, convolution):
    """Check a convolution, and the gradients of a small network, against plain Python."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001
        found.attempt("torch: %s" % error, lambda: None, lambda _: math.nan)
        return
    rand = random.Random(_SEED)
    roundoff = _factor(32, "float32", precision)
    if convolution:
        x = torch.tensor([[_matrix(rand, 9, 8) for _ in range(3)]])
        w = torch.tensor([[_matrix(rand, 3, 3) for _ in range(3)] for _ in range(4)])
        image, kernels = x.tolist()[0], w.tolist()
        found.attempt(
            "torch conv2d",
            lambda: torch.nn.functional.conv2d(x, w, stride=2).tolist()[0],
            lambda planes: _error_of_convolution(planes, image, kernels, roundoff),
        )
    for batch in (1, 5):
        x, a, b = _matrix(rand, batch, 7), _matrix(rand, 7, 9), _matrix(rand, 9, 4)
        found.attempt(
            "torch gradients, batch %d" % batch,
            lambda x=x, a=a, b=b: _gradients(torch, x, a, b),
            lambda grads, x=x, a=a, b=b: _error_of_gradients(grads, x, a, b, roundoff),
        )


def _error_of_convolution(planes, image, kernels, roundoff):
    """Return the error of a convolution with 3x3 kernels and stride 2, as a share of its bound."""
    worst = 0.0
    for kernel, plane in zip(kernels, planes):
        for i, line in enumerate(plane):
            for j, value in enumerate(line):
                terms = [
                    kernel[c][p][q] * image[c][2 * i + p][2 * j + q]
                    for c in range(len(kernel))
                    for p in range(3)
                    for q in range(3)
                ]
                error = abs(value - math.fsum(terms)) / (roundoff * math.fsum(map(abs, terms)) + _TINY)
                if not error <= worst:
                    worst = error
    return worst


def _gradients(torch, x, a, b):
    """Return the gradients of the sum of (relu(x A) B)² by A and B."""
    left, right = (torch.tensor(value, requires_grad=True) for value in (a, b))
    ((torch.relu(torch.tensor(x) @ left) @ right) ** 2).sum().backward()
    return left.grad.tolist(), right.grad.tolist()


def _error_of_gradients(grads, x, a, b, roundoff):
    """Return their error as a share of a bound: four roundings follow each other, and inputs are rounded."""
    h = [[max(value, 0.0) for value in row] for row in _product(x, a)]
    dy = [[2.0 * value for value in row] for row in _product(h, b)]
    dh = [[g if v > 0.0 else 0.0 for g, v in zip(gs, vs)] for gs, vs in zip(_product(dy, _columns(b)), h)]
    worst = 0.0
    for grad, expected in zip(grads, (_product(_columns(x), dh), _product(_columns(h), dy))):
        largest = max(abs(value) for row in expected for value in row)  # a sum may cancel: of the largest
        for row, right in zip(grad, expected):
            for value, true in zip(row, right):
                error = abs(value - true) / (16.0 * roundoff * largest + _TINY)
                if not error <= worst:
                    worst = error
    return worst


# --- The agent's workload ---------------------------------------------------------------------------------


class _Redirected:
    """Sends descriptors 1 and 2, and what Python writes to them, into a file."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        sys.stdout.flush()
        sys.stderr.flush()
        self.saved = [os.dup(1), os.dup(2)]
        out = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        errors = os.open(self.path + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.close(out)
        os.close(errors)
        return self

    def __exit__(self, *_):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        for number, saved in zip((1, 2), self.saved):
            os.dup2(saved, number)
            os.close(saved)

    def text(self):
        """Return what was written to standard output."""
        return _text(self.path)

    def errors(self):
        """Return what was written to standard error."""
        return _text(self.path + ".err")


def _text(path):
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return file.read()


def _run_once(argv, output):
    """Run a program as `python ARGV` would; return (exit code, seconds, what it raised or "")."""
    saved_argv, saved_path, saved_main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    code, why = 0, ""
    gc.collect()
    with output:
        started = time.perf_counter()
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
            why = "" if code == 0 else "it ended with exit code %d" % code
        except BaseException as error:  # noqa: BLE001 the agent's own affair
            import traceback

            traceback.print_exc()
            code, why = 1, "%s: %s" % (type(error).__name__, str(error)[:300])
        seconds = time.perf_counter() - started
    sys.argv, sys.path[:] = saved_argv, saved_path
    sys.modules["__main__"] = saved_main
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    return code, seconds, why


class _Folder:
    """The working folder, which is put back to what it was before each run."""

    def __init__(self):
        self.place = os.getcwd()
        self.copy = tempfile.mkdtemp()
        self.names = set(os.listdir(self.place))
        for name in self.names:
            source, target = os.path.join(self.place, name), os.path.join(self.copy, name)
            if os.path.isdir(source):
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copy2(source, target, follow_symlinks=False)

    def restore(self):
        os.chdir(self.place)
        for name in os.listdir(self.place):
            _remove(os.path.join(self.place, name))
        for name in self.names:
            source, target = os.path.join(self.copy, name), os.path.join(self.place, name)
            if os.path.isdir(source):
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copy2(source, target, follow_symlinks=False)


def _remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


class _Layers:
    """Counts the sizes of torch's layers while a workload runs."""

    def __init__(self, modules):
        self.linear, self.convolutions = {}, {}
        self.hook = None
        if "torch" in modules:
            try:
                import torch

                self.torch = torch
                self.hook = torch.nn.modules.module.register_module_forward_pre_hook(self.see)
            except (ImportError, AttributeError):  # a torch without it: then sizes are the usual ones
                self.hook = None

    def see(self, module, inputs):
        torch = self.torch
        x = inputs[0] if inputs else None
        if not isinstance(x, torch.Tensor):
            return
        if isinstance(module, torch.nn.Linear):
            rows = x.numel() // max(x.shape[-1], 1)
            layer = (module.in_features, module.out_features, rows)
            self.linear[layer] = self.linear.get(layer, 0) + 1
        elif isinstance(module, torch.nn.Conv2d) and x.dim() == 4:
            key = (
                x.shape[0], module.in_channels, x.shape[2], x.shape[3],
                module.out_channels, module.kernel_size[0], module.stride[0],
            )  # fmt: skip
            self.convolutions[key] = self.convolutions.get(key, 0) + 1

    def done(self):
        if self.hook is not None:
            self.hook.remove()

    @staticmethod
    def most(counts):
        return [
            list(key) for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_LAYERS_MAX]
        ]


def workload(request, modules, folder, report):
    """Run the agent's workload, the first time for its output and the sizes of its layers, then for its time.

    `report(parts)` is told what is known, as it comes.
    """
    asked = request["workload"]
    output = _Redirected(folder.copy + ".output")
    layers = _Layers(modules)
    code, first, why = _run_once(asked["argv"], output)
    layers.done()
    found = {
        "stdout": output.text(), "code": code, "first": first, "again": [], "cpu": 0.0, "note": why,
    }  # fmt: skip
    sizes = {"layers": layers.most(layers.linear), "convolutions": layers.most(layers.convolutions)}
    report({"workload": found, **sizes})
    if code:
        return
    started, cpu = time.perf_counter(), time.process_time()
    while len(found["again"]) < asked["repeats"]:
        folder.restore()
        code, seconds, why = _run_once(asked["argv"], output)
        if code:
            found["again"], found["note"] = [], "it can't be run twice in a process: %s" % why
            break
        found["again"].append(seconds)
        if time.perf_counter() - started > asked["seconds"]:
            break
    found["cpu"] = time.process_time() - cpu
    report({"workload": found})


# --- Where the time goes ----------------------------------------------------------------------------------


def profile(request, modules, folder):
    """Run the workload once more under a profiler; return {"total", "operators", "python"}, in seconds.

    By torch's operators where the agent has torch, else by Python's functions. The output is the libraries'
    too, where their variables tell them to talk: `kernels_of` reads it.
    """
    argv, output = request["workload"]["argv"], _Redirected(folder.copy + ".profiled")
    folder.restore()
    if "torch" not in modules:
        return _profile_python(argv, output)
    import torch

    with torch.autograd.profiler.profile() as seen:
        code, total, why = _run_once(argv, output)
    if code:
        return {"note": why}
    rows = [
        {
            "name": event.key,
            "calls": event.count,
            "self": event.self_cpu_time_total / 1e6,
            "total": event.cpu_time_total / 1e6,
        }
        for event in seen.key_averages()
    ]
    inside = sum(row["self"] for row in rows)
    return {
        "total": total,
        "operators": sorted(rows, key=lambda row: -row["self"])[:_ROWS_MAX],
        "python": max(total - inside, 0.0),
        **kernels_of(output.text(), output.errors()),
    }


def _profile_python(argv, output):
    import cProfile
    import pstats

    seen = cProfile.Profile()
    code, total, why = seen.runcall(_run_once, argv, output)
    if code:
        return {"note": why}
    rows = [
        {
            "name": "%s:%d %s" % (os.path.basename(file), line, name),
            "calls": calls,
            "self": own,
            "total": all_,
        }
        for (file, line, name), (_, calls, own, all_, _) in getattr(pstats.Stats(seen), "stats").items()  # noqa: B009
    ]
    rows = sorted(rows, key=lambda row: -row["self"])[:_ROWS_MAX]
    return {"total": total, "operators": rows, "python": total, **kernels_of(output.text(), output.errors())}


_MKL_CALL = re.compile(r"^MKL_VERBOSE (\w+)\(([^)]*)\) ([\d.]+)(ns|us|ms|s) ")
_ONEDNN_CALL = re.compile(r"^(?:onednn|dnnl)_verbose,(?:v\d+,)?(?:primitive,)?exec,cpu,(.*),([\d.]+)$")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_ABOUT = (
    ("MKL", re.compile(r"^MKL_VERBOSE (oneMKL.*|Intel.*)$")),
    ("oneDNN", re.compile(r"^(?:onednn|dnnl)_verbose,(?:v\d+,)?info,cpu,isa:(.*)$")),
    ("OpenBLAS", re.compile(r"^Core: (\w+)$")),
)


def kernels_of(out, errors):
    """Read what oneDNN, MKL and OpenBLAS said: {"kernels": [...], "libraries": {name: text}}."""
    counts: "dict[tuple[str, str], tuple[int, float]]" = {}
    libraries = {}
    for line in (out + "\n" + errors).splitlines():
        mkl, onednn = _MKL_CALL.match(line), _ONEDNN_CALL.match(line)
        if mkl:
            sizes = ",".join(word for word in mkl.group(2).split(",") if not word.startswith("0x"))
            seconds = float(mkl.group(3)) * _UNITS[mkl.group(4)]
            _count(counts, "MKL", "%s %s" % (mkl.group(1), sizes), seconds)
        elif onednn:
            words = onednn.group(1).split(",")
            name = "%s %s %s" % (words[0], words[1], words[-1])
            _count(counts, "oneDNN", name, float(onednn.group(2)) / 1e3)
        for library, pattern in _ABOUT:
            about = pattern.match(line)
            if about:
                libraries[library] = about.group(1)
    rows = [
        {"library": library, "name": name, "calls": calls, "seconds": seconds}
        for (library, name), (calls, seconds) in counts.items()
    ]
    rows.sort(key=operator.itemgetter("seconds"), reverse=True)
    return {"kernels": rows[:_ROWS_MAX], "libraries": libraries}


def _count(counts, library, name, seconds):
    calls, total = counts.get((library, name), (0, 0.0))
    counts[library, name] = (calls + 1, total + seconds)


def families(modules):
    """Return {library: the instructions that its kernels were picked for}, as far as they tell."""
    found = {}
    if "torch" in modules:
        import torch

        found["ATen"] = str(torch.backends.cpu.get_cpu_capability())
        found["threads"] = str(torch.get_num_threads())
    if "numpy" in modules:
        try:
            from numpy._core._multiarray_umath import __cpu_features__ as features
        except ImportError:  # numpy before 2.0
            return found
        found["numpy"] = " ".join(name for name, there in features.items() if there)
    return found


# --- Kernels by themselves --------------------------------------------------------------------------------


def _time(work):
    """Return (seconds of a call, seconds that measuring took): the median over batches of calls."""
    work()  # whatever it needs for the first time, such as absent pages, counts for nothing
    begin = time.perf_counter()
    work()
    once = max(time.perf_counter() - begin, 1e-7)
    calls = max(1, min(int(_CALLS_SECONDS / once), 10000))
    batches = []
    for _ in range(_BATCHES if once < 0.1 else 1):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        batches.append((time.perf_counter() - started) / calls)
    return sorted(batches)[len(batches) // 2], time.perf_counter() - begin


def _cases(modules, layers, convolutions):
    if "torch" in modules:
        return _torch_kernels(layers or [[4, 64, 1], [64, 64, 1], [64, 2, 1]], convolutions)
    return _numpy_kernels(layers or [[64, 64, 1]]) if "numpy" in modules else ()


def kernels(modules, layers, convolutions, seconds):
    """Return the times of single kernels, as many as `seconds` suffice for: those of torch, else of numpy.

    `layers` are [inputs, outputs, batch], `convolutions` [batch, channels, height, width, kernels, size,
    stride].
    """
    found = []
    for name, work in _cases(modules, layers, convolutions):
        if seconds <= 0:
            break
        each, spent = _time(work)
        found.append({"name": name, "seconds": each})
        seconds -= spent
    return found


def touch(modules):
    """Use what a measurement uses, once: builds trace it, so that it is at hand without a cold pack.

    But for convolutions, which take as much code as all else: an agent that has some has them traced itself.
    """
    gate(modules, convolution=False, compare=False)
    for _, work in _cases(modules, None, ()):
        work()


def _numpy_kernels(layers):
    import numpy

    rand = numpy.random.default_rng(_SEED)

    def random_matrix(*shape):
        return rand.random(shape, dtype=numpy.float32)

    for n, m, k in [(256, 256, 256), *((batch, i, o) for i, o, batch in layers)]:
        a, b = random_matrix(n, m), random_matrix(m, k)
        yield "gemm %dx%dx%d" % (n, m, k), lambda a=a, b=b: a @ b
    a, x = random_matrix(256, 256), random_matrix(256)
    yield "gemv 256x256", lambda: a @ x


def _torch_kernels(layers, convolutions):
    import torch

    torch.manual_seed(_SEED)
    chain = _chain(layers)
    batch = chain[0][2]
    network = torch.nn.Sequential()
    for number, (inputs, outputs, _) in enumerate(chain):
        network.add_module("l%d" % number, torch.nn.Linear(inputs, outputs))
        network.add_module("a%d" % number, torch.nn.Tanh())
    x = torch.randn(batch, chain[0][0])
    name = "-".join(map(str, [chain[0][0], *(layer[1] for layer in chain)]))

    def forward():
        with torch.no_grad():
            network(x)

    def backward():
        network(x).sum().backward()

    yield "forward %s, batch %d" % (name, batch), forward
    yield "backward %s, batch %d" % (name, batch), backward
    for n, m, k in [(256, 256, 256), *((b, i, o) for i, o, b in layers[:3])]:
        a, b = torch.randn(n, m), torch.randn(m, k)
        yield "gemm %dx%dx%d" % (n, m, k), lambda a=a, b=b: torch.mm(a, b)
    a, v = torch.randn(256, 256), torch.randn(256)
    yield "gemv 256x256", lambda: torch.mv(a, v)
    for n, channels, height, width, out, size, stride in convolutions:
        layer = torch.nn.Conv2d(channels, out, size, stride)
        image = torch.randn(n, channels, height, width)

        def convolve(layer=layer, image=image):
            with torch.no_grad():
                layer(image)

        yield "conv2d %dx%d %dx%dx%d" % (out, size, channels, height, width), convolve


def _chain(layers):
    """Return layers of one batch, each fitting to the one before, as far as there are such."""
    batch = max(layers, key=lambda layer: layer[2])[2]
    left = [layer for layer in layers if layer[2] == batch]
    outputs = {layer[1] for layer in left}
    start = next((layer for layer in left if layer[0] not in outputs), left[0])
    chain = [start]
    left.remove(start)
    while True:
        following = next((layer for layer in left if layer[0] == chain[-1][1]), None)
        if following is None:
            return chain
        chain.append(following)
        left.remove(following)


# --- The request ------------------------------------------------------------------------------------------


def versions(modules):
    """Return the versions of Python and of `modules`, as far as they can be imported."""
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for name in modules:
        try:
            found[name] = str(__import__(name).__version__)
        except (ImportError, AttributeError):
            continue
    return found


def main(argv):
    """Do what the request asks for."""
    with open(argv[1], encoding="utf-8") as file:
        request = json.load(file)
    result = {"finished": False}

    def report(parts):
        result.update(parts)
        temporary = argv[2] + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(result, file)
        os.replace(temporary, argv[2])

    modules = request["modules"]
    report({})
    folder = _Folder()
    if request.get("workload"):
        workload(request, modules, folder, report)
    if request.get("profile"):
        report({"profile": {**profile(request, modules, folder), "families": families(modules)}})
    convolutions = request.get("convolutions") or result.get("convolutions") or ()
    if request["cold"]:
        convolutions = convolutions or [_ATARI]
    if request.get("gate"):
        report({"gate": gate(modules, request["precision"], bool(convolutions))})
    if request.get("kernels"):
        layers = request.get("layers") or result.get("layers")
        report({"kernels": kernels(modules, layers, convolutions, request["kernel_seconds"])})
    report({"versions": versions(modules), "finished": True})


if __name__ == "__main__":
    main(sys.argv)
