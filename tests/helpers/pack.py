"""Pack folders into archives, in the layouts that data sets have."""

import io
import os
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path


def tar(path: str | Path, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    """A tar archive of these files, by their names."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return Path(path)


def zipped(path: str | Path, files: dict[str, bytes], deflated: bool = True) -> Path:
    """A zip archive of these files, by their names."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return Path(path)


def contents(folder: str | Path) -> dict[str, bytes]:
    """The files below a folder by their names in it, in order."""
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def by_first(files: dict[str, bytes], depth: int) -> dict[str, dict[str, bytes]]:
    """Files by the first `depth` parts of their names, and then by the rest."""
    parts: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        words = name.split("/")
        parts.setdefault("/".join(words[:depth]), {})["/".join(words[depth:])] = data
    return parts


def web_dataset(folder: str | Path, files: dict[str, bytes], shard: int = 7) -> Path:
    """Shards of files named SPLIT/CLASS/FILE, in their order, with the index of the class."""
    for split, own in by_first(files, 1).items():
        names = sorted({name.split("/")[0] for name in own})
        samples = [*own.items()]
        for number, start in enumerate(range(0, len(samples), shard)):
            members: dict[str, bytes] = {}
            for place, (name, data) in enumerate(samples[start : start + shard], start):
                members[f"{place:06}{os.path.splitext(name)[1]}"] = data
                members[f"{place:06}.cls"] = b"%d" % names.index(name.split("/")[0])
            tar(Path(folder) / f"{split}-{number:04}.tar", members)
    return Path(folder)


def pack_all(folder: str | Path, out: str | Path, kinds: Iterable[str]) -> dict[str, Path]:
    """Pack a folder SPLIT/CLASS/FILE as each of these kinds, below `out`."""
    files, out = contents(folder), Path(out)
    made = {}
    for kind in kinds:
        if kind == "tar":
            made[kind] = tar(out / "all.tar", files)
        elif kind == "zip":
            made[kind] = zipped(out / "all.zip", files)
        elif kind == "stored zip":
            made[kind] = zipped(out / "stored.zip", files, deflated=False)
        elif kind == "outer folder":
            inner = {f"./photos/{name}": data for name, data in files.items()}
            made[kind] = tar(out / "outer.tar", inner, tarfile.GNU_FORMAT)
        elif kind == "splits":
            for split, own in by_first(files, 1).items():
                for part in range(2):
                    chosen = dict([*own.items()][part::2])
                    tar(out / "splits" / f"{split}-{part:04}.tar", chosen)
            made[kind] = out / "splits"
        elif kind == "classes":
            for place, own in by_first(files, 2).items():
                tar(out / "classes" / f"{place}.tar", own)
            made[kind] = out / "classes"
        elif kind == "WebDataset":
            made[kind] = web_dataset(out / "web", files)
    return made
