"""Takes the pictures of the web UI in docs/use/screenshots, with the default model in Chromium.

python docs/site/screenshots.py                 those that the documents show
python docs/site/screenshots.py --all FOLDER    every view, desktop and phone, light and dark
"""

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "use" / "screenshots"
SIZES = {"desktop": (1280, 820), "phone": (390, 844)}
SHOWN = ("chat-light", "speculate-light", "dashboard-dark", "chat-phone-dark")
QUESTION = "Write a Python function that counts the vowels in a string."
PATIENCE_MS = 120_000


def chat(page: Page) -> None:
    """Ask twice, so that there is a conversation with code."""
    for count, text in enumerate((QUESTION, "Now the consonants."), start=1):
        page.fill(".composer textarea", text)
        page.press(".composer textarea", "Enter")
        page.wait_for_selector(f":nth-match(.message.assistant:not(.running), {count})")


def settings(page: Page) -> None:
    """Open the settings of a conversation."""
    page.click("[aria-controls=options]")


def speculate(page: Page) -> None:
    """Answer one question both ways, and look at the step of an accepted draft token."""
    page.fill("#race-tokens", "120")
    page.click(".go")
    page.wait_for_selector(".verdict.good")
    page.locator(".lane").first.locator(".token:not(.src-target)").nth(6).hover()


def dashboard(page: Page) -> None:
    """Wait for a few looks at the numbers, while requests run."""
    for index in range(4):
        body = {"messages": [{"role": "user", "content": f"{QUESTION} {index}"}], "max_tokens": 160}
        root = page.url.partition("#")[0]
        httpx.post(f"{root}v1/chat/completions", json=body, timeout=PATIENCE_MS / 1000)
    page.wait_for_timeout(2500)


VIEWS: dict[str, tuple[str, Callable[[Page], None]]] = {
    "chat": ("chat", chat),
    "settings": ("chat", settings),
    "speculate": ("speculate", speculate),
    "dashboard": ("dashboard", dashboard),
}


def take(browser: Browser, root: str, name: str, folder: Path) -> None:
    """Take one picture: view, perhaps -phone, and -light or -dark, are its name."""
    view, *phone, scheme = name.split("-")
    width, height = SIZES["phone" if phone else "desktop"]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    address, prepare = VIEWS[view]
    page.goto(f"{root}/#{address}")
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("#server[data-state=ok]")
    prepare(page)
    page.wait_for_timeout(300)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    # Few colours are half of the bytes, and look the same.
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        folder / f"{name}.png", optimize=True
    )
    context.close()


def main() -> None:
    """Start a server, take the pictures, end it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    folder: Path | None = parser.parse_args().all
    names = SHOWN
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        names = tuple(
            f"{view}{size}-{scheme}"
            for view in VIEWS
            for size in ("", "-phone")
            for scheme in ("light", "dark")
        )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("there is no chromium in the PATH (Debian: apt-get install chromium)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "forerun", "serve", "--port", str(port)])
    try:
        while not _healthy(root):
            if server.poll() is not None:
                sys.exit("the server ended")
            time.sleep(0.2)
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name in names:
                take(browser, root, name, folder or FOLDER)
    finally:
        server.terminate()
        server.wait()


def _healthy(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    main()
