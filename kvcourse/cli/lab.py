"""`kvcourse lab`: the reader's copy of the chapters, opened in JupyterLab.

JupyterLab's settings for the course (no news prompt, no update check) lie in the folder `jupyter/` beside
this file and reach the server through JUPYTER_CONFIG_PATH: nothing is written into the reader's own settings.
The access token stays on and the server listens on this machine only.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from kvcourse import paths
from kvcourse.cli import CommandError, working_copy

START = "00_start_here.ipynb"
SETTINGS = Path(__file__).parent / "jupyter"


def main(args):
    """Bring the copy up to date, check the port, start the server; returns its exit status."""
    chapters, work = paths.chapters_dir(), working_copy.work_dir()
    files = working_copy.course_files(chapters)
    chapter = _chapter_to_open(args, files)
    if not args.no_server:
        check_port(args.port)
    try:
        if args.fresh:
            names = files if args.fresh == "all" else [working_copy.find_chapter(args.fresh, files)]
            _report(working_copy.renew(chapters, work, names))
        _report(working_copy.update(chapters, work))
    except OSError as error:
        raise CommandError(
            f"your copy of the chapters cannot be brought up to date ({error.filename or work}: "
            f"{error.strerror or error}): mend that, or choose another folder with KVCOURSE_WORK"
        ) from None
    print(f"your copy of the chapters: {work}")
    if args.no_server:
        return 0
    return _start(command(work, chapter, args.port, args.no_browser, args.jupyter), environment())


def _chapter_to_open(args, files):
    if args.chapter:
        return working_copy.find_chapter(args.chapter, files)
    if args.fresh and args.fresh != "all":
        return working_copy.find_chapter(args.fresh, files)
    return START


def _report(changes):
    for name in changes.kept:
        print(f"kept your version as {name}")
    for name in changes.newer:
        print(
            f"{name} has changed in the course; yours stays. For the new one: "
            f"kvcourse lab --fresh {name.removesuffix('.ipynb')}"
        )


def check_port(port):
    """Raise CommandError when `port` cannot be opened on this machine; the message names a free one."""
    if not 0 < port < 65536:
        raise CommandError(f"port {port} does not exist: ports go from 1 to 65535, choose one with --port")
    try:
        _bind(port)
    except OSError as error:
        free = _free_port()
        raise CommandError(
            f"port {port} cannot be used ({error.strerror}), perhaps because a lab still runs there: "
            f"choose another with --port {free} (make lab PORT={free})"
        ) from None


def _bind(port):
    """Open and close a listening socket on the loopback address; returns its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if (
            os.name == "posix"
        ):  # as the server does: a port whose last connection is just closing counts as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
        return probe.getsockname()[1]


def _free_port():
    for port in range(8889, 8989):
        try:
            return _bind(port)
        except OSError:
            continue
    return _bind(0)  # any port the system has left


def command(work, chapter, port, no_browser=False, extra=()):
    """The command line that starts JupyterLab of this very environment on `work`, opening `chapter`."""
    line = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={work}",
        f"--LabApp.default_url=/lab/tree/{chapter}",
        # Tabs of the reader's other projects would open here as missing files.
        f"--LabApp.workspaces_dir={work / '.workspaces'}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
    ]
    if no_browser:
        line.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")  # containers; the token is still asked for
    return [*line, *extra]


def environment():
    """The server's environment: the reader's own, with the course's JupyterLab settings in front."""
    config = os.pathsep.join(filter(None, [str(SETTINGS), os.environ.get("JUPYTER_CONFIG_PATH")]))
    return {**os.environ, "JUPYTER_CONFIG_PATH": config}


def _start(line, env):
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(line[0], line, env)  # one process, so that Ctrl-C reaches JupyterLab and nobody else
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Windows: Ctrl-C is JupyterLab's to handle
    return subprocess.call(line, env=env)
