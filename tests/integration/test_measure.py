"""measure.py with torch and numpy: the gate against right and wrong kernels, layers, times, profiles."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rvbundle_runtime
from rvbundle_runtime.measured import SCRIPTS, Measured, from_json, from_result
from rvbundle_runtime.profiling import from_result as profile_from_result
from rvbundle_runtime.profiling import profile_lines
from tests.conftest import AGENTS, TEST_CACHE, build

pytestmark = pytest.mark.torch

MEASURE = Path(rvbundle_runtime.__file__).parent / "guest" / SCRIPTS[0]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GATE = {"modules": ["torch", "numpy"], "gate": True}


def venvs() -> Sequence[Path]:
    """Return the Pythons of the tests' environments that have torch and numpy."""
    return [
        venv / "bin" / "python"
        for venv in sorted((TEST_CACHE / "build" / "environment").glob("*/venv"))
        if list(venv.glob("lib/*/site-packages/torch/lib")) and list(venv.glob("lib/*/site-packages/numpy"))
    ]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with torch and numpy."""
    if not venvs():
        build(AGENTS / "torchprobe", tmp_path_factory.mktemp("torchprobe"))
    return venvs()[0]


@dataclass(frozen=True)
class Measure:
    """Starts measure.py in a folder of the test's own."""

    python: Path
    folder: Path

    def __call__(
        self,
        request: dict[str, Any],
        env: dict[str, str] | None = None,
        words: Sequence[str] = (str(MEASURE),),
    ) -> Any:
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        (self.folder / "request").write_text(json.dumps(request))
        done = subprocess.run(
            [self.python, *words, self.folder / "request", self.folder / "result"],
            cwd=scratch,
            env={"PATH": os.environ["PATH"], **ONE_THREAD, **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return from_json((self.folder / "result").read_bytes())

    def measured(
        self,
        request: dict[str, Any],
        env: dict[str, str] | None = None,
        words: Sequence[str] = (str(MEASURE),),
    ) -> Measured:
        found = from_result(self(request, env, words))
        assert found.finished
        assert found.errors == ()
        return found

    def program(self, text: str) -> str:
        path = self.folder / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    def library(self, text: str) -> str:
        """Return the path of a shared library compiled from C."""
        source, library = self.folder / "preloaded.c", self.folder / "preloaded.so"
        source.write_text(text)
        zig = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC"]
        subprocess.run([*zig, source, "-o", library], check=True, timeout=300)
        return str(library)


@pytest.fixture
def measure(python: Path, tmp_path: Path) -> Measure:
    return Measure(python, tmp_path)


@pytest.mark.parametrize(
    "env",
    [
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem"},
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
        {"ATEN_CPU_CAPABILITY": "avx512", "OPENBLAS_CORETYPE": "SkylakeX"},
        {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    ],
    ids=lambda env: "-".join(env.values()),
)
def test_right_kernels_pass(measure: Measure, env: dict[str, str]) -> None:
    measured = measure.measured(GATE, env)
    assert measured.wrong == ()
    assert {check.check.partition(":")[0] for check in measured.gate} == {
        "torch float32",
        "torch float64",
        "numpy float32",
        "numpy float64",
    }
    assert len(measured.gate) == 25
    # Rounding was seen, and all of it is accounted for: a bound that nothing comes near would check nothing.
    assert all(check.error is not None for check in measured.gate)
    assert sum((check.error or 0) > 0.02 for check in measured.gate) >= 20


def test_the_family_that_was_asked_for_is_the_one_that_is_told(measure: Measure) -> None:
    env = {"ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE": "Nehalem"}
    assert dict(measure.measured(GATE, env).libraries)["ATen"] == "AVX2"


# C = alpha op(A) op(B) + beta C, as sgemm_ has it; {x} and {factor} are what is wrong with it.
SGEMM = """
#include <math.h>
#include <string.h>
static float rounded(float x) {{ unsigned n; memcpy(&n, &x, 4); n += 0x7fff + ((n >> 16) & 1);
    n &= 0xffff0000; memcpy(&x, &n, 4); return x; }}
static float same(float x) {{ return x; }}
void sgemm_(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha,
            const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c,
            const int *ldc) {{
    int turn_a = (*ta | 32) != 'n', turn_b = (*tb | 32) != 'n';
    for (long j = 0; j < *n; j++) for (long i = 0; i < *m; i++) {{
        double sum = 0;
        for (long p = 0; p < *k; p++)
            sum += (double){x}(turn_a ? a[p + i * *lda] : a[i + p * *lda])
                 * {x}(turn_b ? b[j + p * *ldb] : b[p + j * *ldb]);
        float *to = c + i + j * *ldc;
        *to = (float)({factor} * *alpha * sum + (*beta != 0 ? (double)*beta * *to : 0));
        {more}
    }}
}}
(void)same; (void)rounded;
""".replace("(void)same; (void)rounded;\n", "void *keep_rvbundle[] = {{(void *)same, (void *)rounded}};\n")


def sgemm(x: str = "same", factor: str = "1.0", more: str = "") -> str:
    return SGEMM.format(x=x, factor=factor, more=more)


def failed(measured: Measured) -> set[str]:
    return {check.check.partition(",")[0] for check in measured.wrong}


def test_a_right_sgemm_in_the_place_of_the_wheels_own_passes(measure: Measure) -> None:
    assert measure.measured(GATE, {"LD_PRELOAD": measure.library(sgemm())}).wrong == ()


def test_an_sgemm_that_is_off_by_a_thousandth_fails(measure: Measure) -> None:
    measured = measure.measured(GATE, {"LD_PRELOAD": measure.library(sgemm(factor="1.001"))})
    assert not measured.right
    assert {"torch float32: matrix times matrix", "torch float32: addmm"} <= failed(measured)
    assert "torch float32: two layers" in failed(measured)
    assert not any(name.startswith(("numpy", "torch float64")) for name in failed(measured))


def test_one_wrong_element_at_the_edge_of_a_block_fails(measure: Measure) -> None:
    more = "if (i == 128) *to += 1e-3f;"  # of 129 rows, in one of the shapes
    measured = measure.measured(GATE, {"LD_PRELOAD": measure.library(sgemm(more=more))})
    assert "torch float32: matrix times matrix" in failed(measured)


def test_a_nan_that_is_lost_fails(measure: Measure) -> None:
    more = "if (isnan(*to)) *to = 0;"
    measured = measure.measured(GATE, {"LD_PRELOAD": measure.library(sgemm(more=more))})
    assert failed(measured) == {"torch float32: NaN and infinity stay in their row or column"}


@pytest.mark.parametrize(
    "more",
    [
        "if (j + 1 == *n && isnan(*to)) c[i] = *to;",
        "if (i + 1 == *m && isnan(*to)) c[j * *ldc] = *to;",
    ],
    ids=["row", "column"],
)
def test_a_nan_that_leaks_fails(measure: Measure, more: str) -> None:
    measured = measure.measured(GATE, {"LD_PRELOAD": measure.library(sgemm(more=more))})
    assert failed(measured) == {"torch float32: NaN and infinity stay in their row or column"}


def test_memory_that_is_read_before_it_is_written_fails(measure: Measure) -> None:
    """beta = 0 means that C is not read, whatever it holds (OpenBLAS had kernels that did)."""
    text = sgemm().replace("(*beta != 0 ? (double)*beta * *to : 0)", "(double)*beta * *to")
    measured = measure.measured(GATE, {"LD_PRELOAD": measure.library(text)})
    assert "torch float32: matrix times matrix" in failed(measured)


@pytest.mark.parametrize(("precision", "right"), [("bf16", True), ("tf32", False), ("float32", False)])
def test_products_of_inputs_rounded_to_bfloat16(measure: Measure, precision: str, right: bool) -> None:
    env = {"LD_PRELOAD": measure.library(sgemm(x="rounded"))}
    measured = measure.measured({**GATE, "precision": precision}, env)
    assert measured.right is right
    assert all("torch float32" in name for name in failed(measured))


def test_a_thousandth_beyond_bfloat16_is_seen(measure: Measure) -> None:
    env = {"LD_PRELOAD": measure.library(sgemm(x="rounded", factor="1.02"))}
    assert not measure.measured({**GATE, "precision": "bf16"}, env).right


ALLOW_BF16 = """
import runpy, sys
import torch
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ROUNDS = """
import torch
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
print((torch.full((64, 64), 1.001) @ torch.eye(64))[0, 0].item() != torch.tensor(1.001).item())
"""


def test_torchs_own_bf16_products(measure: Measure) -> None:
    """Where torch makes use of the permission (oneDNN 3.12 does with AMX, not with AVX512_BF16 alone)."""
    (measure.folder / "allow.py").write_text(ALLOW_BF16)
    words = (str(measure.folder / "allow.py"), str(MEASURE))
    assert measure.measured({**GATE, "precision": "bf16"}, {}, words).right
    rounds = subprocess.run([measure.python, "-c", ROUNDS], capture_output=True, text=True, check=True)
    assert rounds.stdout in ("True\n", "False\n")
    assert measure.measured(GATE, {}, words).right is (rounds.stdout == "False\n")


def test_gate_without_torch(measure: Measure) -> None:
    measured = measure.measured({"modules": ["numpy"], "gate": True})
    assert measured.right
    assert all(check.check.startswith("numpy") for check in measured.gate)
    assert "torch" not in dict(measured.versions)
    assert measured.threads is None


AGENT = """
    import sys
    import torch
    torch.manual_seed(0)
    torch.set_num_interop_threads(1) if "once" in sys.argv else None
    conv = torch.nn.Conv2d(4, 8, 4, stride=2, padding=1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(5):
        net(torch.ones(4))
    loss = net(torch.ones(16, 4)).square().sum()
    loss.backward()
    optimizer.step()
    conv(torch.ones(1, 4, 10, 10))
    print(f"loss {loss.item():.4f}")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    import numpy
    numpy.seterr(all="raise")
    try:
        numpy.ones(1) / 0
    except FloatingPointError:
        print("raised")
"""


def test_a_torch_agent(measure: Measure) -> None:
    program = measure.program(AGENT)
    workload = {"argv": [program], "seconds": 1.0, "repeats": 3}
    request = {**GATE, "workload": workload, "kernels": True, "kernel_seconds": 1.0}
    measured = measure.measured(request)
    alone = subprocess.run([measure.python, program], capture_output=True, text=True, check=True)
    assert measured.workload is not None
    assert measured.workload.stdout == alone.stdout
    assert measured.workload.note == ""
    assert len(measured.workload.again) == 3
    assert measured.workload.first is not None
    assert measured.workload.first > 3 * max(measured.workload.again)  # it has imported torch
    assert measured.layers == ((4, 32, 1), (32, 2, 1), (4, 32, 16), (32, 2, 16))
    assert measured.convolutions == ((4, 8, 4, 4, 2, 2, 12, 12, 1),)
    assert measured.right
    assert measured.threads == 1
    assert [kernel.name for kernel in measured.kernels] == [
        "gemm 256x256x256",
        "gemm 16x4x32",
        "gemm 16x32x2",
        "gemv 256x256",
        "gemv 32x4",
        "gemv 2x32",
        "conv2d 1x4x12x12, 8 of 4x4, stride 2x2",
        "mlp 4-32-2 batch 1 forward",
        "mlp 4-32-2 batch 1 forward and backward",
    ]
    assert all(kernel.seconds and 1e-7 < kernel.seconds < 1 for kernel in measured.kernels)


def test_a_torch_agent_that_can_be_run_only_once(measure: Measure) -> None:
    workload = {"argv": [measure.program(AGENT), "once"], "seconds": 1.0, "repeats": 3}
    measured = measure.measured({**GATE, "workload": workload})
    assert measured.workload is not None
    assert measured.workload.again == ()
    assert "interop" in measured.workload.note
    assert measured.workload.code == 0
    assert measured.right


def test_layers_that_are_given_are_the_ones_that_are_timed(measure: Measure) -> None:
    request = {"modules": ["torch"], "kernels": True, "layers": [[8, 16, 1]], "kernel_seconds": 0.5}
    names = [kernel.name for kernel in measure.measured(request).kernels]
    assert names[-1] == "mlp 8-16 batch 1 forward and backward"
    assert "gemv 16x8" in names


def test_kernels_of_numpy_alone(measure: Measure) -> None:
    request = {"modules": ["numpy"], "kernels": True, "layers": [[8, 16, 1]], "kernel_seconds": 0.5}
    names = [kernel.name for kernel in measure.measured(request).kernels]
    assert names == ["gemm 256x256x256", "gemv 256x256", "gemv 16x8"]


def test_a_profile(measure: Measure) -> None:
    workload = {"argv": [measure.program(AGENT)], "seconds": 0.0, "repeats": 1}
    env = {
        "ONEDNN_VERBOSE": "profile_exec",
        "MKL_VERBOSE": "1",
        "OPENBLAS_VERBOSE": "2",
        "OPENBLAS_CORETYPE": "Haswell",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
    result = measure({"modules": ["torch", "numpy"], "workload": workload, "profile": True}, env)
    measured, profile = from_result(result), profile_from_result(result)
    assert measured.workload is not None
    assert measured.workload.stdout.startswith("loss ")
    assert measured.workload.stdout.count("\n") == 2
    operators = {operator.name: operator for operator in profile.operators}
    assert operators["aten::addmm"].calls == 12
    assert operators["aten::addmm"].own <= operators["aten::addmm"].total < profile.total
    assert 0 < profile.python < profile.total
    kernels = {(kernel.library, kernel.name.split()[0]): kernel for kernel in profile.kernels}
    assert ("oneDNN", "convolution") in kernels
    assert kernels["MKL", "SGEMM"].calls > 0
    families = dict(profile.families)
    assert families["ATen"] == "AVX2"
    assert families["OpenBLAS"] == "Haswell"
    assert "AVX2" in families["oneDNN"]
    assert "MKL" in families
    assert any("aten::addmm" in line for line in profile_lines(profile))
