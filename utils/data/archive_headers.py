"""The headers of tar and zip archives, which `tarfile` and `zipfile` read."""

import io
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Any

from utils.errors import UserError

_HEADERS = 2**20  # most bytes that `tarfile` may read at once, whatever a header says
_COMPRESSED = {  # the first bytes of a compressed file, and what decompresses it
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}


class _Headers(io.FileIO):
    """A file of which only headers are read: a damaged one may ask for any number of bytes."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _HEADERS:
            raise tarfile.ReadError("a header is too large")
        return super().read(size)


def read_tar(path: str, size: int) -> Iterator[tuple]:
    """Yield the name, offset, stored size, size, and whether it is deflated, of each member; only
    the name if it is not a plain file.
    """
    with _Headers(path) as file:
        head = file.read(6)
        for first, tool in _COMPRESSED.items():
            if head.startswith(first):
                fix = f"decompress it first ({tool} {os.path.basename(path)})"
                raise UserError(f"{path}: is compressed, so images cannot be read in place", fix)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members = []  # type: ignore[attr-defined]  # they would fill the memory
                is_plain = member.isreg() and not member.issparse()
                if member.size < 0 or (is_plain and member.size > size - member.offset_data):
                    raise tarfile.ReadError("a member is cut off")
                if member.isdir():
                    yield f"{member.name}/", 0, 0, 0, False
                elif is_plain:
                    yield member.name, member.offset_data, member.size, member.size, False
                else:
                    yield (member.name,)
        # at the first header that is not valid; two blocks of zeros are the end
        file.seek(archive.offset)
        if size - archive.offset < 2 * tarfile.BLOCKSIZE:
            raise tarfile.ReadError("its end is missing")
        while rest := file.read(_HEADERS):
            if any(rest):
                raise tarfile.ReadError("a header is damaged, or something follows its end")


def read_zip(path: str, size: int) -> Iterator[tuple]:
    """As `read_tar`."""
    with zipfile.ZipFile(path) as archive:
        file: Any = archive.fp
        file.seek(size - 22 - len(archive.comment))
        if file.read(4) != b"PK\5\6":
            raise zipfile.BadZipFile("something follows its end")
        for member in archive.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if member.is_dir():
                yield member.filename, 0, 0, 0, False
                continue
            methods = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
            is_plain = kind in (0, stat.S_IFREG) and member.compress_type in methods
            if member.flag_bits & 1 or not is_plain:
                yield (member.filename,)
                continue
            file.seek(member.header_offset)
            start, method, *lengths = struct.unpack("<4s4xH16xHH", file.read(30))
            own = file.read(lengths[0])
            encoding = "utf-8" if member.flag_bits & 0x800 else "cp437"
            offset = member.header_offset + 30 + sum(lengths)
            stored = member.compress_size
            deflated = method == zipfile.ZIP_DEFLATED
            if (
                start != b"PK\3\4"
                or method != member.compress_type
                or own != member.orig_filename.encode(encoding)
                or offset + stored > size
                or not (deflated or stored == member.file_size)
            ):
                raise zipfile.BadZipFile(f"the two headers of {member.filename} differ")
            yield member.filename, offset, stored, member.file_size, deflated
