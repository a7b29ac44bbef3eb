"""The zstd decoder: Python's own (3.14 and newer) or the `zstandard` package.

Imported late: a warm run decodes nothing.
"""

from collections.abc import Callable

from rvbundle_runtime.errors import RvbundleError

Decoder = Callable[[bytes, int], bytes]


def decoder() -> Decoder:
    """Return a function `(compressed, raw_size) -> raw` that never yields more than `raw_size` bytes.

    The function raises ValueError for data that is no zstd frame or that has another raw size.
    One decoder may be used by one thread at a time.
    """
    try:
        import zstandard
    except ImportError:
        return _stdlib_decoder()
    context = zstandard.ZstdDecompressor()

    def decode(data: bytes, raw_size: int) -> bytes:
        try:
            declared = zstandard.frame_content_size(data)
            if declared != raw_size:
                raise ValueError(f"the frame declares {declared} bytes, expected {raw_size}")
            raw = context.decompress(data, max_output_size=raw_size)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        return _checked(raw, raw_size)

    return decode


def _stdlib_decoder() -> Decoder:
    try:
        from compression import zstd
    except ImportError:
        raise RvbundleError(
            "this Python has no zstd decoder", "pip install zstandard, or use Python 3.14 or newer"
        ) from None

    def decode(data: bytes, raw_size: int) -> bytes:
        try:
            raw = zstd.ZstdDecompressor().decompress(data, max_length=raw_size + 1)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from error
        return _checked(raw, raw_size)

    return decode


def _checked(raw: bytes, raw_size: int) -> bytes:
    if len(raw) != raw_size:
        raise ValueError(f"the frame holds {len(raw)} bytes, expected {raw_size}")
    return raw
