"""Build the sdist and the wheel of a commit, so that anybody who does it again gets the same bytes.

What differs between two builds of the same sources is taken away: files that git does not know (the commit is exported), times
(all are the commit's), owners, modes, the order of files, the umask. The wheel is built from the unpacked sdist, which shows that
this is enough.
The interpreter that runs this needs setuptools; constraints.txt has its exact version, which stands in the wheel.

    python .ci/dist.py [--out dist] [--commit HEAD]
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel of a commit, reproducibly.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder for the two files (default: dist)")
    parser.add_argument("--commit", default="HEAD", help="what is built (default: HEAD)")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for path in build(arguments.commit, out):
        print(path)
    if arguments.commit == "HEAD" and git("status", "--porcelain", "--untracked-files=no").strip():
        print("uncommitted changes are not in it", file=sys.stderr)


def build(commit: str, out: Path) -> list[Path]:
    """The two files of a commit, in `out`."""
    name = git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
    epoch = int(git("show", "--no-patch", "--format=%ct", name))
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as folder:
        exported, unpacked, made = (Path(folder) / each for each in ("exported", "unpacked", "made"))
        made.mkdir()
        unpack(git("archive", "--format=tar", name), exported)
        hook("build_sdist", exported, made, epoch)
        (sdist,) = made.glob("*.tar.gz")
        normalise(sdist, epoch)
        unpack(gzip.decompress(sdist.read_bytes()), unpacked)
        hook("build_wheel", unpacked / sdist.name.removesuffix(".tar.gz"), made, epoch)
        return [Path(shutil.copy(path, out / path.name)) for path in sorted(made.iterdir())]


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE).stdout


def unpack(data: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


def hook(name: str, source: Path, out: Path, epoch: int) -> None:
    """Call the build backend in a process whose environment says only what it needs."""
    env = {key: os.environ[key] for key in ("HOME", "PATH") if key in os.environ}
    env |= {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    call = f"import sys, setuptools.build_meta as backend; backend.{name}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", call, str(out)], cwd=source, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{name} failed")


def normalise(sdist: Path, epoch: int) -> None:
    """Write the archive again, sorted, with one time, and without owners."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as written:
        written.write(packed.getvalue())


if __name__ == "__main__":
    main()
