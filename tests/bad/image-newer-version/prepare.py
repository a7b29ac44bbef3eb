"""Make the broken input."""

import hashlib
from pathlib import Path

from rvbundle_runtime import format as fmt


def prepare(folder: Path, image: Path) -> None:
    data = image.read_bytes()
    start = len(data) - fmt.FOOTER_SIZE
    fields = list(fmt.FOOTER_BODY.unpack(data[start : start + fmt.FOOTER_BODY.size]))
    fields[1] = fmt.FORMAT_VERSION + 1
    body = fmt.FOOTER_BODY.pack(*fields)
    check = hashlib.sha256(body).digest()[: fmt.FOOTER_CHECK_SIZE]
    (folder / "damaged.rvb").write_bytes(data[:start] + body + check)
