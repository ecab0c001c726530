"""The page of a master in a browser: headless Chromium, driven by its WebDriver."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

import httpx
import pytest

from mooncake_store.http.server import HttpServer

MIB = 1 << 20
DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DEADLINE_S = 60.0

MISSING = "no browser: apt-get install chromium chromium-driver"


@pytest.fixture(scope="module", autouse=True)
def require_browser():
    """Skipped where there is no browser, but not in CI, where all must run."""
    if DRIVER and BROWSER:
        return
    if os.environ.get("CI") == "true":
        raise FileNotFoundError(MISSING)
    pytest.skip(MISSING)


class Browser:
    """One window, by the W3C's WebDriver protocol."""

    def __init__(self, http, session):
        self.http, self.session = http, session

    def open(self, url):
        self.complaints()  # those of the page before
        self.http.post(f"/session/{self.session}/url", json={"url": url}).raise_for_status()

    def run(self, script):
        body = {"script": script, "args": []}
        answer = self.http.post(f"/session/{self.session}/execute/sync", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def emulate(self, scheme):
        body = {
            "cmd": "Emulation.setEmulatedMedia",
            "params": {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        }
        path = f"/session/{self.session}/goog/cdp/execute"
        assert self.http.post(path, json=body).status_code == 200

    def complaints(self):
        """What the page wrote to the console as errors."""
        answer = self.http.post(f"/session/{self.session}/se/log", json={"type": "browser"})
        return [entry["message"] for entry in answer.json()["value"] if entry["level"] == "SEVERE"]

    def wait_for(self, condition):
        """Wait until a JavaScript expression is true; give its value."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < deadline_s, f"{condition}: {self.run('return document.body.innerText')}"
            time.sleep(0.05)
        return value


@pytest.fixture(scope="module")
def webdriver(tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("browser")
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [DRIVER, f"--port={port}"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
            deadline_s = time.monotonic() + DEADLINE_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/status").json()["value"]["ready"]:
                        break
                assert time.monotonic() < deadline_s, "chromedriver does not answer"
                time.sleep(0.05)
            yield http
    finally:
        process.terminate()
        process.wait(20)


FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-proxy-server",
    "--window-size=1200,1400",
)


@pytest.fixture(scope="module")
def browser(webdriver):
    always = {
        "goog:chromeOptions": {"binary": BROWSER, "args": FLAGS},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    answer = webdriver.post("/session", json={"capabilities": {"alwaysMatch": always}})
    assert answer.status_code == 200, answer.text
    session = answer.json()["value"]["sessionId"]
    yield Browser(webdriver, session)
    webdriver.delete(f"/session/{session}")


@pytest.fixture
def store(world):
    return world.store(lend=8 * MIB)


def text_of(browser, selector):
    return browser.run(f"return document.querySelector({selector!r})?.innerText ?? ''")


def test_the_page_shows_the_store_and_follows_it(world, browser, store):
    server = world.stack.enter_context(HttpServer(store))
    store.put("a", bytes(2 * MIB))
    browser.open(server.url)
    browser.wait_for("document.body.dataset.looks > 0")
    assert text_of(browser, "#tiles .tile").split() == ["1", "objects"]
    assert "2.0 MiB" in text_of(browser, "#tiles")
    assert "8.0 MiB" in text_of(browser, "#segments tbody tr")
    # A quarter of the bar is taken.
    assert (
        browser.run("return document.querySelector('#segments .bar .evictable').getAttribute('width')")
        == "25"
    )
    store.put("b", bytes(MIB))
    for _ in range(3):
        store.get("b")
    browser.wait_for("document.querySelector('#tiles .tile b').innerText === '2'")
    assert "1.0 MiB" in text_of(browser, "#hot tbody tr")
    assert text_of(browser, "#hot tbody td code") == "b"
    assert "3.0 MiB" in text_of(browser, "#tenants tbody tr")
    assert "Locate" in text_of(browser, "#requests")
    assert browser.run("return document.querySelectorAll('#charts svg.spark').length") == 4
    assert browser.complaints() == []


def test_the_page_says_when_the_master_is_away(world, browser):
    engine = world.engine()
    master = world.store(engine)
    server = world.stack.enter_context(HttpServer(world.store(world.engine(), engine.address)))
    browser.open(server.url)
    browser.wait_for("document.querySelector('#state.good')")
    master.close()
    browser.wait_for("document.querySelector('#state.bad')")
    assert "away" in text_of(browser, "#state") or "master" in text_of(browser, "#state")


def test_the_page_asks_for_the_token_that_the_store_asks_for(world, browser, store):
    server = world.stack.enter_context(HttpServer(store, token="secret"))
    browser.open(server.url)
    browser.wait_for("!document.querySelector('#login').hidden")
    browser.run(
        "document.querySelector('#token').value = 'secret'; document.querySelector('#login button').click()"
    )
    browser.wait_for("document.querySelector('#state.good') && document.querySelector('#login').hidden")


# Contrast by WCAG 2: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio
CONTRAST = """
const light = (color) => {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = color.match(/\\d+/g).map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const back = light(getComputedStyle(document.querySelector('section')).backgroundColor);
const worst = [...document.querySelectorAll('h1, h2, p, th, td, .tile b, .tile span, a')].map((one) => {
  const ink = light(getComputedStyle(one).color);
  return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
});
return Math.min(...worst);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_light_and_on_dark(world, browser, store, scheme):
    server = world.stack.enter_context(HttpServer(store))
    browser.emulate(scheme)
    browser.open(server.url)
    browser.wait_for("document.querySelector('#state.good')")
    back = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    assert browser.run(CONTRAST) >= 4.5


def test_the_api_page_shows_every_path(world, browser, store):
    server = world.stack.enter_context(HttpServer(store))
    browser.open(f"{server.url}/docs")
    browser.wait_for("document.querySelectorAll('.opblock').length >= 10")
    assert "/v1/objects/{key}" in text_of(browser, "#swagger-ui").replace("\u200b", "")
    assert browser.complaints() == []
