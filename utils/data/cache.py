"""Arrays in cache files, mapped into memory; a file is complete or does not exist."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np

from utils.errors import UserError
from utils.files import whole_file

# the CRC-32 of any data followed by its own CRC-32
_UNCHANGED = 0x2144DF1C


def open_cached(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap | None:
    """The array in a file, mapped into memory; None if the file cannot be opened.

    A file that is damaged, or not an array of this type and these first dimensions, is deleted, and
    a line says so.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
        is_expected = array.dtype == dtype and array.shape[: len(shape)] == shape
        if is_expected and crc32(np.memmap(path, mode="r").data) == _UNCHANGED:
            return array
    except OSError:  # there is no file, or it may be sound
        return None
    except Exception:  # of any class, for a damaged header and for a file that is too short
        pass
    with suppress(OSError):  # one of several processes deletes it
        path.unlink()
        print(f"{path}: is not usable, and is computed again")
    return None


def cached(
    path: Path, shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> np.memmap:
    """The array in a file, mapped into memory. If the file is missing or damaged, the `chunks` are
    written first.

    They are written in order, completely or not at all. Several processes may do so at once. Raises
    UserError if the file cannot be written or mapped.
    """
    if (array := open_cached(path, shape, dtype)) is not None:
        return array
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        with whole_file(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in chunks:
                # not to a memory map, because a full disk would raise SIGBUS
                file.write(chunk.data)
            file.flush()
            file.write(crc32(np.memmap(file.name, mode="r").data).to_bytes(4, "little"))
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        problem = f"{path.parent}: cannot be used as a cache ({error.strerror})"
        raise UserError(problem, "choose another folder with --cache_dir DIR") from error
