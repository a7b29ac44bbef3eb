"""What numeric libraries print, and operators within operators."""

import pytest

from rvbundle_runtime.guest import measure_profile as p

# Printed by torch 2.13.0's x86-64 wheel (oneDNN 3.12.0, MKL 2024.2) and numpy 2.4.6 (OpenBLAS 0.3.31).
MKL = (
    "MKL_VERBOSE SGEMM(T,N,64,8,64,0x7ffdb8da37c0,0x55d018eef440,64,0x55d013b84f40,64,0x7ffdb8da37e0,"
    "0x55d018e90940,64) 2.48ms CNR:OFF Dyn:1 FastMM:1 TID:0  NThr:2"
)
MKL_HEAD = (
    "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture Intel(R) "
    "Architecture processors, Lnx 2.60GHz lp64 gnu_thread"
)
CONV = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx512_core,forward_training,src:f32:a:blocked:abcd"
    "::f0 wei:f32:a:blocked:Acdb16a::f0 bia:undef::undef::: dst:f32:a:blocked:aBcd16b::f0,attr-scratchpad:"
    "user,alg:convolution_direct,mb1_ic4oc32_ih84oh20kh8sh4dh0ph0_iw84ow20kw8sw4dw0pw0,0.25"
)
BF16 = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,src:f32::blocked:ab::f0 "
    "wei:f32::blocked:ba::f0 dst:f32::blocked:ab::f0,attr-scratchpad:user attr-fpmath:bf16,,8x8:8x8,1.5"
)
OLD = (  # oneDNN before 3.4
    "onednn_verbose,exec,cpu,inner_product,gemm:jit,forward_inference,src_f32::blocked:ab:f0,,,mb1ic4oc8,0.5"
)
ISA = "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost and bfloat16 support"
CORE = "Core: SkylakeX"
USDT = "USDT:2026-12-01 03:59:06 27819:27819 SyncActivityProfilerHandler.cpp:52] profiler_start"
LIBRARIES = [MKL_HEAD, MKL, ISA, CONV, BF16, OLD, CORE, USDT]


def test_the_programs_own_lines_are_told_apart() -> None:
    own = ["reward 3", "", "Core: two words", "see MKL_VERBOSE x", "onednn_verbose is a variable"]
    text = "".join(f"{a}\n{b}\n" for a, b in zip(own, LIBRARIES, strict=False))
    kept, theirs = p.split(text + "no newline at the end")
    assert kept == "\n".join(own) + "\nno newline at the end"
    assert theirs == LIBRARIES[: len(own)]
    assert all(p.is_library_line(line) for line in LIBRARIES)
    assert p.split("a\r\nb\x0bc\n")[0] == "a\r\nb\x0bc\n"


def test_families() -> None:
    assert p.families([*LIBRARIES, CORE, "Core: Nehalem"]) == {
        "MKL": MKL_HEAD.removeprefix("MKL_VERBOSE "),
        "oneDNN": "Intel AVX-512 with Intel DL Boost and bfloat16 support",
        "OpenBLAS": "SkylakeX, Nehalem",
    }


def test_kernel_calls_are_summed_by_shape() -> None:
    found = p.kernel_calls([MKL, CONV, *LIBRARIES, MKL.replace("2.48ms", "20us")])
    assert [(k["library"], k["name"], k["calls"], round(k["seconds"], 9)) for k in found] == [
        ("MKL", "SGEMM (T,N,64,8,64,64,64,64)", 3, 0.00498),
        ("oneDNN", "matmul brg_matmul:avx512_core as bf16 (8x8:8x8)", 1, 0.0015),
        (
            "oneDNN",
            "convolution jit:avx512_core (mb1_ic4oc32_ih84oh20kh8sh4dh0ph0_iw84ow20kw8sw4dw0pw0)",
            2,
            0.0005,
        ),
        ("oneDNN", "inner_product gemm:jit (mb1ic4oc8)", 1, 0.0005),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "onednn_verbose,",
        "onednn_verbose,v1,primitive,exec",
        CONV[:-4] + "x",
        "MKL_VERBOSE SGEMM(",
        ISA,
        MKL_HEAD,
    ],
)
def test_lines_that_tell_of_no_call(line: str) -> None:
    assert p.kernel_calls([line]) == []


def test_self_times_of_operators_within_operators() -> None:
    events = [
        (1, 0, 100, "linear"),
        (1, 10, 60, "addmm"),
        (1, 20, 10, "copy"),
        (1, 40, 10, "copy"),
        (2, 15, 50, "copy"),  # another thread, at the same time
        (1, 200, 100, "sum"),
        (1, 210, 50, "sum"),  # within one of the same name
    ]
    sums = p.self_times(reversed(events))
    assert {
        name: [calls, round(own * 1e9), round(full * 1e9)] for name, (calls, own, full) in sums.items()
    } == {
        "linear": [1, 40, 100],
        "addmm": [1, 40, 60],
        "copy": [3, 70, 70],
        "sum": [2, 100, 100],
    }


def test_the_rest_is_pythons() -> None:
    made = p.summary({"a": [1, 0.25, 1.0], "b": [2, 0.5, 0.5]}, 1.0)
    assert [operator["name"] for operator in made["operators"]] == ["b", "a"]
    assert (made["total"], made["python"]) == (1.0, 0.25)
    assert len(p.summary({str(n): [1, 0.1, 0.1] for n in range(99)}, 1.0)["operators"]) == p.TOP


def test_functions_are_profiled_without_torch() -> None:
    def work() -> str:
        return ",".join(sorted(map(str, range(20000))))

    value, made = p.profiled(work)
    assert value.startswith("0,1,10,")
    assert made["kind"] == "functions"
    names = [operator["name"] for operator in made["operators"]]
    assert any("sorted" in name for name in names)
    assert any(name.endswith(" work") for name in names)
    assert 0 < made["python"] <= made["total"]
