"""Hash-checked files: verify what is there, download what is not."""

import hashlib
import http.client
import urllib.error
import urllib.request
from contextlib import suppress
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
    """Raise DamagedFile, in one line, unless `path` exists, can be read and has this SHA-256."""
    path = Path(path)
    if not path.is_file():
        raise DamagedFile(f"{path} is missing: {remedy}")
    try:
        found = sha256_of(path)
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({_reason(error)}): {remedy}") from None
    if found != sha256:
        raise DamagedFile(f"{path} is damaged: SHA-256 {found[:12]}… instead of {sha256[:12]}…: {remedy}")


def download(url, target, sha256, size=None, timeout=30):
    """Fetch `url` to `target` with a progress bar; return the path.

    The bytes go to `target` + ".part" and get their name when the hash fits, so
    that an interrupted download leaves nothing that looks whole. A file that is
    already there and whole is kept.

    Raises DownloadFailed: no network, an HTTP error, bytes with another hash, or a
    target that cannot be written.
    """
    target = Path(target)
    part = target.with_name(target.name + ".part")
    try:
        if target.is_dir():
            raise DownloadFailed(f"{target} is a folder where a file must go: move it away and try again")
        if target.is_file() and sha256_of(target) == sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            for piece in _pieces(url, target, size, timeout):
                file.write(piece)
        found = sha256_of(part)
        if found != sha256:
            raise DownloadFailed(
                f"{url} sent other bytes: SHA-256 {found[:12]}… instead of {sha256[:12]}…: try again, "
                f"or put the right file at {target} by hand"
            )
        part.replace(target)
    except OSError as error:
        raise DownloadFailed(
            f"{target} cannot be written ({_reason(error)}): make its folder writable and free some space, "
            f"or choose another folder with KVCOURSE_HOME"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink()
    return target


def _pieces(url, target, size, timeout):
    """The bytes of `url`, 1 MiB at a time. What goes wrong on the way here becomes DownloadFailed."""
    from tqdm.auto import tqdm

    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            total = size or int(answer.headers.get("Content-Length") or 0) or None
            received = 0
            with tqdm(total=total, unit="B", unit_scale=True, desc=target.name) as bar:
                while piece := answer.read(1 << 20):
                    received += len(piece)
                    bar.update(len(piece))
                    yield piece
            if total and received < total:
                raise OSError(f"connection closed after {received:,} of {total:,} bytes")
    except (OSError, http.client.HTTPException, ValueError) as error:
        code = f"HTTP {error.code}: " if isinstance(error, urllib.error.HTTPError) else ""
        raise DownloadFailed(
            f"{url} could not be fetched ({code}{_reason(error)}): "
            f"check the network, or put the file at {target} by hand"
        ) from None


def _reason(error):
    """The first line of an error's own words, or its kind when it has none."""
    words = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return (str(words).splitlines() or [type(error).__name__])[0]
