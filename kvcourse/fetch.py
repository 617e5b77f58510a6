"""Hash-checked files: verify what is there, download what is not."""

import hashlib
import urllib.error
import urllib.request
from pathlib import Path


class DamagedFile(RuntimeError):
    """A file is missing or its bytes differ from the recorded SHA-256."""


class DownloadFailed(RuntimeError):
    """A file could not be fetched; the message says from where, why and the way out."""


def sha256_of(path):
    """SHA-256 of a file as a hex string, read in pieces of 1 MiB."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path, sha256, remedy):
    """Raise DamagedFile, in one line, unless `path` exists with this SHA-256."""
    path = Path(path)
    if not path.is_file():
        raise DamagedFile(f"{path} is missing: {remedy}")
    found = sha256_of(path)
    if found != sha256:
        raise DamagedFile(f"{path} is damaged: SHA-256 {found[:12]}… instead of {sha256[:12]}…: {remedy}")


def download(url, target, sha256, size=None, timeout=30):
    """Fetch `url` to `target` with a progress bar; return the path.

    The bytes go to `target` + ".part" and get their name when the hash fits, so
    that an interrupted download leaves nothing that looks whole. A file that is
    already there and whole is kept.

    Raises DownloadFailed: no network, an HTTP error, or bytes with another hash.
    """
    target = Path(target)
    if target.is_file() and sha256_of(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        _copy(url, part, size, timeout)
    except (urllib.error.URLError, OSError) as error:
        part.unlink(missing_ok=True)
        code = f"HTTP {error.code}: " if isinstance(error, urllib.error.HTTPError) else ""
        raise DownloadFailed(
            f"{url} could not be fetched ({code}{getattr(error, 'reason', error)}): "
            f"check the network, or put the file at {target} by hand"
        ) from None
    found = sha256_of(part)
    if found != sha256:
        part.unlink()
        raise DownloadFailed(
            f"{url} sent other bytes: SHA-256 {found[:12]}… instead of {sha256[:12]}…: try again, "
            f"or put the right file at {target} by hand"
        )
    part.replace(target)
    return target


def _copy(url, part, size, timeout):
    from tqdm.auto import tqdm

    with urllib.request.urlopen(url, timeout=timeout) as answer, open(part, "wb") as file:
        total = size or int(answer.headers.get("Content-Length") or 0) or None
        with tqdm(total=total, unit="B", unit_scale=True, desc=part.stem) as bar:
            while piece := answer.read(1 << 20):
                file.write(piece)
                bar.update(len(piece))
        if total and file.tell() < total:
            raise OSError(f"connection closed after {file.tell():,} of {total:,} bytes")
