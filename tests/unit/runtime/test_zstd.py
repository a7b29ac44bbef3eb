import builtins
import contextlib
import sys
from types import ModuleType

import pytest
import zstandard

from rvbundle_runtime import zstd
from rvbundle_runtime.errors import RvbundleError

RAW = b"to be or not to be " * 50
FRAME = zstandard.ZstdCompressor().compress(RAW)
BARE = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)


class FakeStdlib(ModuleType):
    """`compression.zstd` as Python 3.14 has it, made of what is there."""

    class ZstdError(Exception):
        pass

    class ZstdDecompressor:
        def decompress(self, data: bytes, max_length: int = -1) -> bytes:
            try:
                return zstandard.ZstdDecompressor().decompressobj().decompress(data)[:max_length]
            except zstandard.ZstdError as error:
                raise FakeStdlib.ZstdError(str(error)) from error


@pytest.fixture(params=["zstandard", "compression.zstd"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> zstd.Decoder:
    if request.param == "compression.zstd":
        package = ModuleType("compression")
        package.zstd = FakeStdlib("compression.zstd")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "zstandard", None)
        monkeypatch.setitem(sys.modules, "compression", package)
        monkeypatch.setitem(sys.modules, "compression.zstd", package.zstd)
    return zstd.decoder()


def test_round_trip(decode: zstd.Decoder) -> None:
    assert decode(FRAME, len(RAW)) == RAW
    assert decode(FRAME, len(RAW)) == RAW  # a decoder can be used again
    assert decode(zstandard.ZstdCompressor().compress(b""), 0) == b""


@pytest.mark.parametrize("size", [0, 1, len(RAW) - 1, len(RAW) + 1, 1 << 30])
def test_another_size(decode: zstd.Decoder, size: int) -> None:
    with pytest.raises(ValueError, match=f"expected {size}"):
        decode(FRAME, size)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zstd at all",
        FRAME[:3],
        FRAME[:-1],
        FRAME[: len(FRAME) // 2],
        b"\x28\xb5\x2f\xfd" + bytes(40),
    ],
    ids=["empty", "foreign", "magic cut", "end cut", "half", "zeros"],
)
def test_no_frame(decode: zstd.Decoder, data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data, len(RAW))


def test_every_byte_flipped_is_refused_or_has_the_right_size(decode: zstd.Decoder) -> None:
    for place in range(len(FRAME)):
        damaged = FRAME[:place] + bytes([FRAME[place] ^ 0x55]) + FRAME[place + 1 :]
        with contextlib.suppress(ValueError):
            assert len(decode(damaged, len(RAW))) == len(RAW)


def test_undeclared_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the frame declares -1 bytes, expected 950"):
        zstd.decoder()(BARE, len(RAW))


def test_no_decoder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(RvbundleError) as caught:
        zstd.decoder()
    assert caught.value.message == "this Python has no zstd decoder"
    assert caught.value.hint == "pip install zstandard, or use Python 3.14 or newer"


def test_importing_the_module_imports_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = builtins.__import__

    def note(name: str, *args: object, **kwargs: object) -> object:
        asked.append(name)
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "rvbundle_runtime.zstd")
    monkeypatch.setattr(builtins, "__import__", note)
    import rvbundle_runtime.zstd  # noqa: F401

    assert "zstandard" not in asked
    assert "compression" not in asked
