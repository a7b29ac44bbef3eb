"""Reading an image or a cold pack: every byte is checked before it is used."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rvbundle_runtime import filters
from rvbundle_runtime import format as fmt
from rvbundle_runtime.errors import ImageError
from rvbundle_runtime.zstd import decoder

_FRAMES_KEPT = 4  # decoded frames that a reader keeps: neighbours are asked for together


def _decode_index(data: bytes, raw_size: int) -> bytes:
    """Decode the one or two zstd frames of an index; raises ValueError."""
    if len(data) < fmt.INDEX_HEAD.size:
        raise ValueError("it is too short")
    size, stable = fmt.INDEX_HEAD.unpack_from(data)
    cut = fmt.INDEX_HEAD.size + size
    if cut > len(data) or stable > raw_size:
        raise ValueError("its parts do not fit its size")
    decode = decoder()
    first = decode(data[fmt.INDEX_HEAD.size : cut], stable) if size else b""
    return first + decode(data[cut:], raw_size - len(first))


class Reader:
    """An open image or cold pack; safe to share between threads except for `read_blob`."""

    def __init__(self, path: Path, end: int | None = None) -> None:
        """Open `path` and check its footer and header; `end` is where the image ends, if not the file.

        Raises ImageError if it is missing, is no image, or is damaged there.
        """
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ImageError(f"can't open {path}: {error.strerror}") from None
        try:
            size = os.fstat(self.fd).st_size if end is None else end
            tail = os.pread(self.fd, fmt.FOOTER_SIZE, max(0, size - fmt.FOOTER_SIZE))
            self.footer = fmt.parse_footer(tail, size)
            self.start = size - self.footer.image_size
            fmt.check_header(os.pread(self.fd, fmt.HEADER.size, self.start))
        except ImageError as error:
            os.close(self.fd)
            raise ImageError(f"{path}: {error.message}", error.hint) from None
        except OSError as error:
            os.close(self.fd)
            raise ImageError(f"can't read {path}: {error.strerror}") from None
        self._index: fmt.Index | None = None
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the index stays usable."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def identity(self) -> str:
        """The SHA-256 of the compressed index, in hex: it names the image."""
        return self.footer.identity.hex()

    @property
    def bound_to(self) -> str:
        """The identity of the image that this cold pack belongs to; "" for an image."""
        return "" if self.footer.bound_to == fmt.UNBOUND else self.footer.bound_to.hex()

    def index(self) -> fmt.Index:
        """Return the checked index, read at the first call; raises ImageError."""
        if self._index is None:
            footer = self.footer
            raw = self._checked("index", footer.index_offset, footer.index_size, footer.identity)
            try:
                data = _decode_index(raw, footer.index_raw_size)
            except ValueError as error:
                raise ImageError(f"{self.path}: the index can't be decoded ({error})", fmt.FORGED) from None
            try:
                index = fmt.load_index(data)
                fmt.check_frames(index, footer)
            except ImageError as error:
                raise ImageError(f"{self.path}: {error.message}", error.hint or fmt.FORGED) from None
            self._index = index
        return self._index

    def compressed_frame(self, number: int) -> bytes:
        """Return the compressed bytes of a frame once their digest is checked; raises ImageError."""
        frame = self.index().frames[number]
        return self._checked(f"frame {number}", frame.offset, frame.size, frame.sha256)

    def read_blob(self, number: int) -> bytes:
        """Return a blob's bytes; raises ImageError if its frame or its digest is wrong."""
        blob = self.index().blobs[number]
        parts = [self._frame(f)[start:stop] for f, start, stop in self.extents(number)]
        data = b"".join(parts)
        if hashlib.sha256(data).digest() != blob.sha256:
            raise ImageError(f"{self.path}: blob {blob.sha256.hex()[:12]} is damaged")
        return data

    def read_pieces(self, piece: fmt.Piece) -> Iterator[tuple[int, bytes]]:
        """Yield (offset in the file, bytes) of the ranges that a piece fills; raises ImageError."""
        data, place = self.read_blob(piece.blob), 0
        if piece.filter:
            try:
                data = filters.decode(piece.filter, data)
            except ValueError as error:
                raise ImageError(f"{self.path}: a table can't be decoded ({error})", fmt.FORGED) from None
        for offset, size in piece.ranges:
            yield offset, data[place : place + size]
            place += size

    def extents(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield (frame, start, stop) for the pieces of a blob, in order; offsets count raw bytes."""
        blob = self.index().blobs[number]
        frame, start, left = blob.frame, blob.offset, blob.size
        while left:
            raw_size = self.index().frames[frame].raw_size
            stop = min(raw_size, start + left)
            if stop > start:
                yield frame, start, stop
                left -= stop - start
            frame, start = frame + 1, max(0, start - raw_size)

    def read_frame(self, number: int) -> bytes:
        """Return the raw bytes of a frame; raises ImageError. Safe to call from several threads."""
        frame = self.index().frames[number]
        try:
            return decoder()(self.compressed_frame(number), frame.raw_size)
        except ValueError as error:
            text = f"{self.path}: frame {number} can't be decoded ({error})"
            raise ImageError(text, fmt.FORGED) from None

    def _frame(self, number: int) -> bytes:
        kept = self._kept.get(number)
        if kept is None:
            kept = self.read_frame(number)
            self._kept[number] = kept
            while len(self._kept) > _FRAMES_KEPT:
                self._kept.popitem(last=False)
        return kept

    def _checked(self, what: str, offset: int, size: int, digest: bytes) -> bytes:
        try:
            data = os.pread(self.fd, size, self.start + offset)
        except OSError as error:
            raise ImageError(f"can't read {self.path}: {error.strerror}") from None
        if len(data) != size or hashlib.sha256(data).digest() != digest:
            raise ImageError(
                f"{self.path}: {what} is damaged (its digest is not what the image says)",
                "copy the image again from its source"
                + ("" if what == "index" else "; `rvbundle verify` names all damaged parts"),
            )
        return data
