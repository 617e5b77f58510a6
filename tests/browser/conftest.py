"""A real JupyterLab on loopback and a headless Chromium that may talk to nothing else.

One server and one browser serve the whole session, with `-n` that of each worker; every notebook gets a page
of its own and its kernel is shut down afterwards. The server works on copies, with its own settings, runtime
and progress folders.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 60  # JupyterLab needs about 3 s here; a loaded class-room machine more
START_ATTEMPTS = 3
IN_USE = "is already in use"  # JupyterLab's words for a port that somebody else holds
LOOPBACK = {"127.0.0.1", "localhost"}

# Console errors that are not the course's. Keep it tiny; each with its reason.
ALLOWED_CONSOLE: tuple[str, ...] = (
    # Anywidget says so when a view was not ready within 2 s (a busy machine), and then ignores changes of
    # that view's own traits. The course's views have no changing traits (kvcourse/widgets/views.py), so
    # nothing is lost; a figure that does not appear or a text that does not change fails the tests by itself.
    "[anywidget] Failed to initialize model.",
)


def chromium_path() -> str | None:
    """Chromium of the system, by name in PATH, or ``KVCOURSE_CHROMIUM``."""
    named = os.environ.get("KVCOURSE_CHROMIUM")
    if named:
        return named
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        found = shutil.which(name)
        if found:
            return found
    return None


def screenshot_dir() -> Path:
    """Where pictures go for a person to look at: ``KVCOURSE_SCREENSHOTS`` or ``build/screenshots`` (not in
    git)."""
    folder = Path(os.environ.get("KVCOURSE_SCREENSHOTS") or REPOSITORY / "build" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass
class Server:
    """A running JupyterLab: its folder of notebooks and how to reach it."""

    root: Path
    url: str
    token: str


@dataclass
class Watch:
    """What a page did that it should not have done."""

    foreign: list[str] = field(default_factory=list)  # requests to another machine
    console: list[str] = field(default_factory=list)  # console errors and uncaught exceptions


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _write_settings(folder: Path) -> None:
    # No news prompt (a request to another machine), and no autosave while a test looks at the page.
    settings = {
        "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
        "apputils-extension/themes": '{"theme": "JupyterLab Light"}',
        "docmanager-extension/plugin": '{"autosave": false}',
    }
    for name, content in settings.items():
        file = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def _environment(folder: Path, token: str) -> dict[str, str]:
    # SHELL, HOME and the like stay: only what Jupyter and the course would write is moved into the test's
    # folder.
    return os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_TOKEN": token,
        "KVCOURSE_PROGRESS": str(folder / "progress.json"),
    }


def _is_up(process: subprocess.Popen, url: str, token: str) -> bool:
    """Wait until JupyterLab answers; False when it ended instead, or after START_SECONDS."""
    request = urllib.request.Request(f"{url}/api/status", headers={"Authorization": f"token {token}"})
    # No proxy: an http_proxy of the environment must not be asked for 127.0.0.1.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        try:
            with opener.open(request, timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, browser):
    """JupyterLab on working copies of all chapters, token on; not started when there is no browser."""
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "work"
    root.mkdir()
    chapters = REPOSITORY / "chapters"
    for notebook in sorted(chapters.rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in notebook.parts:
            copy = root / notebook.relative_to(chapters)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(notebook, copy)
    _write_settings(folder / "settings")
    # Between asking for a free port and taking it another worker's server may have taken it: JupyterLab then
    # ends at once (port_retries=0), and another port is tried.
    for attempt in range(1, START_ATTEMPTS + 1):
        log = folder / f"server-{attempt}.log"
        with log.open("w") as stream:
            process, url, token = _start(folder, root, stream)
            try:
                if _is_up(process, url, token):
                    yield Server(root, url, token)
                    return
            finally:
                _stop(process)
        if IN_USE not in log.read_text():
            break
    pytest.fail(f"JupyterLab did not answer within {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def _start(folder: Path, root: Path, stream) -> tuple[subprocess.Popen, str, str]:
    """Start JupyterLab on a port that is free just now; returns the process, its address and its token."""
    port, token = _free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--ServerApp.root_dir={root}"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    # The page then has `window.jupyterapp`, through which the tests run commands and read the notebook's
    # state.
    command += ["--LabApp.expose_app_in_browser=True"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command += ["--allow-root"]
    process = subprocess.Popen(
        command, stdout=stream, stderr=stream, env=_environment(folder, token), cwd=root
    )
    return process, f"http://127.0.0.1:{port}", token


def _stop(process: subprocess.Popen) -> None:
    process.terminate()  # the server shuts its kernels down
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; without one the tests skip, or fail when ``KVCOURSE_REQUIRE_BROWSER=1``."""
    path = chromium_path()
    if path is None:
        reason = "no Chromium found: install one, or name it in KVCOURSE_CHROMIUM"
        if os.environ.get("KVCOURSE_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path,
            args=[
                "--no-sandbox",  # the sandbox cannot start as root in a container
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-proxy-server",
            ],
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A page 1,280 px wide with its ``Watch``; requests to any other machine are refused and recorded."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watch = Watch()

    def route(this) -> None:
        address = urlsplit(this.request.url)
        if address.scheme in {"data", "blob"} or address.hostname in LOOPBACK:
            this.continue_()
        else:
            watch.foreign.append(this.request.url)
            this.abort()

    def complain(text: str) -> None:
        if not any(part in text for part in ALLOWED_CONSOLE):
            watch.console.append(text)

    def on_console(message) -> None:
        if message.type == "error":
            complain(f"{message.text} [{message.location.get('url', '')}]")

    def on_websocket(socket_) -> None:
        if urlsplit(socket_.url).hostname not in LOOPBACK:
            watch.foreign.append(socket_.url)

    context.route("**/*", route)
    page = context.new_page()
    page.on("console", on_console)
    page.on("pageerror", lambda error: complain(f"uncaught: {error.stack or error}"))
    page.on("websocket", on_websocket)
    page.watch = watch
    yield page
    # The kernel too, so that the next notebook has the machine for itself.
    page.evaluate("() => window.jupyterapp?.serviceManager.sessions.shutdownAll()")
    context.close()
