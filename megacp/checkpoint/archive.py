"""The archive of one box in a payload file, as `torch.save` writes it: looked at before torch unpacks it.

Key property: an archive that passes holds one tensor's bytes and a short pickle that names nothing else, so unpacking
it takes no more memory than it has bytes. Rejected: trust in `weights_only`, which keeps code from running but builds a
`bytearray` of any size and unpacks a compressed entry to any size.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from typing import IO

_MOST_PICKLE_BYTES = 1 << 16
"""It says no more than dtype, shape and strides."""
_KNOWN = ("torch._utils _rebuild_tensor_v2", "collections OrderedDict")


class _Slice(io.RawIOBase):
    """`length` bytes of a file from `start` on, which can be sought from their end: DCP's own view cannot."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._place)
        self._file.seek(self._start + self._place)
        content = self._file.read(left if size < 0 else min(size, left))
        self._place += len(content)
        return content


def refuse_growth(file: IO[bytes], start: int, length: int, where: str) -> None:
    """ValueError, naming `where`, unless these bytes of a file are an archive of one tensor and nothing larger."""
    try:
        with zipfile.ZipFile(_Slice(file, start, length)) as archive:
            entries = archive.infolist()
            (pickled,) = (entry for entry in entries if entry.filename.endswith("/data.pkl"))
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or sum(e.file_size for e in entries) > length or pickled.file_size > _MOST_PICKLE_BYTES:
                raise ValueError("it would grow")
            used = [(opcode.name, str(value)) for opcode, value, _ in pickletools.genops(archive.read(pickled))]
    except Exception as error:  # broken archives raise anything
        raise ValueError(f"{where} is no archive of a tensor: {error or type(error).__name__}") from error
    for opcode, value in used:
        known = value in _KNOWN or (value.startswith("torch ") and value.endswith("Storage"))
        if opcode in ("STACK_GLOBAL", "INST") or (opcode == "GLOBAL" and not known):
            raise ValueError(f"{where} is no archive of a tensor: it refers to {value[:100]}")
