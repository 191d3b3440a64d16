"""The page at `/`, and the state that it shows."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from akunu_py.serve.http.guard import AccessRules
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.serving import Served, at_a_socket, fetch

HTML = {"accept": "text/html,*/*"}
KEY = "secret"


async def test_page_allows_only_its_own_code_and_its_own_server(tiny: Served) -> None:
    reply = await fetch(tiny.app, "/", headers=HTML)
    assert reply.body.startswith(b"<!doctype html>")
    assert b"://" not in reply.body
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not {"unsafe", "*", "http"}.intersection(policy.replace("-", " ").split())
    assert (await fetch(tiny.app, "/")).body == b"akunu is running\n"  # to Ollama's clients
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert (await fetch(tiny.app, "/", headers=HTML | headers)).status == 403
        assert (await fetch(tiny.app, "/akunu/status", headers=headers)).status == 403


async def test_page_needs_no_key_but_its_state_does(tiny: Served) -> None:
    app = tiny.application(AccessRules("0.0.0.0", KEY))
    assert (await fetch(app, "/", headers=HTML)).status == 200
    assert (await fetch(app, "/akunu/status")).status == 401
    reply = await fetch(app, "/akunu/status", headers={"authorization": f"Bearer {KEY}"})
    assert reply.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/akunu/chat"])
async def test_status_has_running_requests_and_errors(tiny: Served, path: str) -> None:
    """The first kind of job is begun at once, the second is prepared first."""
    app = tiny.application()
    left = asyncio.Event()
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "id": "1", "max_tokens": 900, "options": {"max_tokens": 900}}
    task = asyncio.create_task(fetch(app, path, body | {"stream": True}, left=left))
    found: dict[str, Any] = {"generated_tokens": 0}
    while not found["generated_tokens"]:
        status = (await fetch(app, "/akunu/status")).json()
        [found] = status["requests"] or [found]
        await asyncio.sleep(0)
    left.set()
    await task
    assert (found["path"], found["state"]) == (path, "decoding")
    assert found["prompt_tokens"] >= found["cached_tokens"]
    assert status["models"][0]["state"] == "ready"
    await fetch(app, path, {"messages": 1})
    await fetch(app, "/nowhere")
    await fetch(app, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})
    status = (await fetch(app, "/akunu/status")).json()
    assert status["requests"] == []
    assert status["totals"]["prompt_tokens"] == found["prompt_tokens"]
    errors = [(each["path"], each["status"]) for each in status["errors"]]
    assert errors == [("/nowhere", 404), (path, 400)]
    assert status["errors"][0]["reason"] == "unknown path /nowhere"


CONTRAST = """(() => {
  const light = (color) => {
    const [red, green, blue] = color.match(/[0-9.]+/g).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  };
  const back = light(getComputedStyle(document.body).backgroundColor);
  return ['h1', '#server', '.answer', '.quiet', '.bad'].map((name) => {
    const front = light(getComputedStyle(document.querySelector(name)).color);
    return Math.max(front, back) / Math.min(front, back);
  });
})()"""


@pytest.mark.e2e
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome")
def test_page_in_chromium_by_keyboard(tiny: Served, tmp_path: Path) -> None:
    app = tiny.application(AccessRules(key=KEY))
    with at_a_socket(app) as url, browser(tmp_path / "profile") as page:
        page.show(1280, 900, "light")
        page.go(url)
        page.wait("document.activeElement.id === 'key'")
        page.type("wrong")
        page.press(
            "Enter", until="document.getElementById('server').textContent.includes('API key')"
        )
        page.run("document.getElementById('key').value = ''")
        page.type(KEY)
        page.press("Enter", until="document.getElementById('models').textContent.includes('ready')")
        assert page.run("document.getElementById('login').hidden")
        _chat(page)
        pictures = set[bytes]()
        for width, height in ((390, 844), (1280, 900)):
            for scheme in ("light", "dark"):
                page.show(width, height, scheme)
                page.wait(f"innerWidth === {width}")
                assert page.run("document.documentElement.scrollWidth") <= width
                assert min(page.run(CONTRAST)) >= 4.5  # WCAG 2.2, level AA
                page.picture(file := tmp_path / f"{width}-{scheme}.png")
                pictures.add(file.read_bytes())
        assert len(pictures) == 4
        _check_events(page, url)


def _chat(page: Page) -> None:
    """Send a message and stop its answer, then send one that is too long, with the keys only."""
    tabs = 0
    while page.run("document.activeElement.id") != "text":
        page.press("Tab")
        tabs += 1
        assert tabs < 9
    page.type("hello")
    page.press("Enter", shift=True)
    assert page.run("document.getElementById('text').value") == "hello\n"
    note = "document.querySelector('#chat > :last-child')?.textContent"
    page.press("Enter", until=f"{note}?.includes('tokens/s')")
    page.press("Escape", until=f"{note}.endsWith('stopped')")
    page.wait("document.getElementById('requests').textContent === 'none'")
    page.run("document.getElementById('text').setRangeText('x'.repeat(9000))")
    page.press("Enter")
    page.wait("document.querySelector('.bad')?.textContent.includes('prompt is too long')")
    page.wait("document.getElementById('errors').textContent.includes('prompt is too long')")


def _check_events(page: Page, url: str) -> None:
    """Check that the page called only its server, and that nothing failed but those requests."""
    requests = [each["params"]["request"]["url"] for each in page.events
                if each["method"] == "Network.requestWillBeSent"]  # fmt: skip
    assert {each for each in requests if not each.startswith((f"{url}/", "data:"))} == set()
    assert not [each for each in page.events if each["method"] == "Runtime.exceptionThrown"]
    logged = [each["params"]["entry"] for each in page.events
              if each["method"] == "Log.entryAdded"]  # fmt: skip
    failed = [each["text"] for each in logged if each["level"] == "error"]
    assert all(text.startswith("Failed to load resource") for text in failed), failed
