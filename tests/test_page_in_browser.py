"""The page as a person has it: in a real browser, of a real server."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import ServerProcess, serving, wait_for_load

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it is in the extra `dev`")

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.browsing import TIMEOUT_MS, launch, say, visiting

KEY = "schlüssel-1"
UNKNOWN = "\N{EN DASH}"  # stands where there is no figure yet
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def locked(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that asks for a key. Its model answers nonsense without end."""
    folder = tmp_path_factory.mktemp("locked")
    with serving(folder, MODEL=str(tiny_model_dir), CACHE_DIR=str(folder), API_KEYS=KEY, N_PARALLEL="2") as process:
        yield process


def unlock(page: Page, key: str = KEY) -> None:
    page.locator("#key-value").fill(key)
    page.locator("#key-value").press("Enter")


def make_it_say(page: Page, said: str) -> None:
    """The next answers are exactly this: the server's own grammars leave the model nothing else to write."""

    def force(route: Route) -> None:
        body = route.request.post_data_json | {"grammar": f"start: {json.dumps(said)}"}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", force)


def wait_for_text(page: Page, num_chars: int) -> None:
    """Return when the answer is so long. (Playwright's own waiting evaluates text, which the policy forbids.)"""
    for _ in range(TIMEOUT_MS // 50):
        if len(page.locator(".said").inner_text()) >= num_chars:
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"there were never {num_chars} characters: {page.locator('.said').inner_text()}")


def last_foot(page: Page) -> str:
    return page.locator(".answer .foot").last.inner_text()


def test_it_shows_the_server(browser: Browser, server: ServerProcess) -> None:
    with visiting(browser, server) as page:
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("smollm2-135m-instruct")
        expect(page.locator("#slots")).to_have_text("0 / 4")
        expect(page.locator("#queue")).to_have_text("0")
        expect(page.locator("#pool")).to_have_text(re.compile(r"^\d+ %$"))
        expect(page.locator("#slot-list li")).to_have_count(4)
        expect(page.locator("#decode")).to_have_text("0 tok/s")
        page.locator("#settings summary").click()
        rows = {row["name"]: row for row in server.http.get("/v1/config").json()["settings"]}
        shown = page.locator("#settings tbody tr")
        expect(shown).to_have_count(len(rows))
        first = shown.first.locator("td").all_inner_texts()
        assert (rows[first[0]]["value"], rows[first[0]]["source"]) == (first[1], "environment"), "what was set is first"
        fingerprint = server.http.get("/v1/config").json()["fingerprint"]
        expect(page.locator("#build")).to_contain_text(fingerprint)
        assert UNKNOWN not in page.locator("#pool-figures").inner_text()


def test_a_conversation(browser: Browser, server: ServerProcess) -> None:
    with visiting(browser, server) as page:
        page.locator("#options summary").click()
        page.get_by_label("Temperature").fill("0")
        say(page, "What is the capital of France?")
        answer = page.locator(".answer .said")
        expect(answer).to_have_text("The capital of France is Paris.")
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
        assert re.match(r"stop · \d+ tokens · [\d.,]+ tok/s · first after ", last_foot(page))
        expect(page.locator("#ttft")).not_to_have_text(UNKNOWN)  # it has ended, and so it is counted
        with page.expect_request("**/v1/chat/completions") as asked:
            say(page, "And of Italy?")
        said = [(message["role"], message["content"]) for message in asked.value.post_data_json["messages"]]
        assert said == [
            ("user", "What is the capital of France?"),
            ("assistant", "The capital of France is Paris."),
            ("user", "And of Italy?"),
        ]
        expect(page.locator(".answer .said").last).to_contain_text("Rome")
        page.get_by_role("button", name="Clear").click()
        expect(page.locator(".answer")).to_have_count(0)


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_streams_and_can_be_stopped(browser: Browser, locked: ServerProcess, how: str) -> None:
    with visiting(browser, locked) as page:
        unlock(page)
        say(page, "Go on and on.")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        wait_for_text(page, 20)
        wait_for_text(page, 1 + len(page.locator(".said").inner_text()))
        expect(page.locator("#slot-list .busy")).to_have_count(1)
        expect(page.locator("#slot-list .busy .figures")).to_contain_text("written")
        expect(page.locator("#itl")).to_have_text(re.compile(r"\d m?s$"))
        assert "tok/s" in last_foot(page)
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Stop").click()
        expect(page.locator(".foot").last).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        wait_for_load(locked, 0)
        expect(page.locator("#slot-list .busy")).to_have_count(0)


def test_a_key_is_asked_for_once_and_kept_in_this_tab_only(browser: Browser, locked: ServerProcess) -> None:
    with visiting(browser, locked) as page:
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        expect(page.locator("#key-refused")).to_be_hidden()
        for _ in range(3):
            page.keyboard.press("Escape")  # a dialog may be closed against its will, but then comes again
        expect(dialog).to_be_visible()
        unlock(page, "wrong")
        expect(page.locator("#key-refused")).to_be_visible()
        unlock(page)
        expect(dialog).to_be_hidden()
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#slot-list li")).to_have_count(2)
        page.reload()
        expect(page.locator("#slot-list li")).to_have_count(2)
        expect(dialog).to_be_hidden()
        assert page.evaluate("localStorage.length") == 0
        assert page.context.cookies() == []
        assert KEY not in page.content()
    with visiting(browser, locked) as page:
        expect(page.get_by_role("dialog")).to_be_visible()


INJECTIONS = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror=window.ran=1>",
    "<svg onload=window.ran=1><a href='javascript:window.ran=1'>x</a></svg>",
    "[click](javascript:window.ran=1) [tab](java\tscript:window.ran=1) [entity](javascript&#58;window.ran=1)",
    "[data](data:text/html,<script>window.ran=1</script>) [vb](vbscript:x) [file](file:///etc/passwd)",
    "![image](https://outside.example/pixel.png) ![data](data:image/svg+xml,<svg/onload=window.ran=1>)",
    "<iframe srcdoc='<script>parent.ran=1</script>'></iframe><object data=x></object><embed src=x>",
    "<a href='javascript:window.ran=1' autofocus onfocus=window.ran=1>x</a><base href='https://outside.example/'>",
    "<style>*{display:none}</style><link rel=stylesheet href=https://outside.example/x.css>",
    "<meta http-equiv=refresh content='0;url=https://outside.example/'><form action=https://outside.example/>",
    "```<img/onerror=1>\n</code></pre><script>window.ran=1</script>\n```",
    "| <b onclick=window.ran=1>a</b> | b |\n|---|:-:|\n| `</td><script>window.ran=1</script>` | [x](javascript:1) |",
    "# </h1><script>window.ran=1</script>\n\n* <!--><img src=x onerror=window.ran=1>-->",
    '[ref]: javascript:window.ran=1\n\n[ref] <javascript:window.ran=1> <https://a.example/?"onclick=window.ran=1>',
]


ALLOWED = {"p", "div", "article", "details", "summary", "h3", "ul", "li", "code", "pre", "a"}
ALLOWED |= {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("said", INJECTIONS)
def test_what_a_model_writes_never_runs(browser: Browser, locked: ServerProcess, said: str) -> None:
    with visiting(browser, locked) as page:
        unlock(page)
        expect(page.locator("#status")).to_have_text("ready")
        make_it_say(page, said)
        say(page, said)
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
        assert last_foot(page).startswith("stop")
        assert page.locator(".asked").inner_text() == said
        kinds = page.evaluate("[...document.querySelectorAll('#talk *')].map((node) => node.localName)")
        assert set(kinds) <= ALLOWED
        attributes = page.evaluate(
            "[...document.querySelectorAll('.said *')].flatMap((node) => [...node.attributes].map(({name}) => name))"
        )
        assert set(attributes) <= {"href", "target", "rel", "style", "tabindex"}
        links = page.evaluate("[...document.querySelectorAll('.said a[href]')].map((link) => link.protocol)")
        assert set(links) <= {"https:"}
        for link in page.locator(".said a:not([href])").all():
            link.click()
        assert page.evaluate("window.ran") is None
        assert page.url == f"{locked.url}/"


def test_markdown_is_shown_as_it_is_meant(browser: Browser, locked: ServerProcess) -> None:
    said = (
        "# Title\n\nSome *soft* and **strong** `code`, https://a.example/x and a\nbreak.\n\n"
        "3. three\n4. four\n   - deep\n\n> quoted\n\n```python\nif a < b:\n    pass\n```\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n---\n\nend \\* &amp; ~~gone~~"
    )

    with visiting(browser, locked) as page:
        unlock(page)
        make_it_say(page, said)
        say(page, "Show me.")
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
        shown = page.locator(".said")
        expect(shown.locator("h3")).to_have_text("Title")
        expect(shown.locator("em")).to_have_text("soft")
        expect(shown.locator("strong")).to_have_text("strong")
        expect(shown.locator("a")).to_have_attribute("href", "https://a.example/x")
        expect(shown.locator("a")).to_have_attribute("rel", "noopener noreferrer")
        assert shown.locator("ol").get_attribute("start") == "3"
        expect(shown.locator("ol li ul li")).to_have_text("deep")
        expect(shown.locator("blockquote")).to_have_text("quoted")
        assert shown.locator("pre code").inner_text() == "if a < b:\n    pass\n"
        assert shown.locator("td").last.evaluate("(cell) => getComputedStyle(cell).textAlign") == "right"
        expect(shown.locator("s")).to_have_text("gone")
        expect(shown.locator("div").last).to_have_text("end * & gone")


def test_the_browser_itself_refuses_markup_and_code_made_of_text(browser: Browser, server: ServerProcess) -> None:
    """Should the page ever slip, its policy holds."""
    attempts = {
        "markup": "document.querySelector('#talk').innerHTML = '<img src=x onerror=window.ran=1>'",
        "handler": "document.body.setAttribute('onclick', 'window.ran=1')",
        "inline": "const s = document.createElement('script'); s.textContent = 'window.ran=1'; document.body.append(s)",
        "elsewhere": "const s = document.createElement('script'); s.src = 'https://outside.example/x.js'",
    }
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    for name, attempt in attempts.items():
        outcome = page.evaluate(f"() => {{ try {{ {attempt}; return 'done' }} catch (error) {{ return error.name }} }}")
        assert outcome == "TypeError", name
    assert page.evaluate("fetch('https://outside.example/').catch((error) => error.name)") == "TypeError"
    assert page.evaluate("window.ran") is None
    context.close()


def test_the_keyboard_is_enough(browser: Browser, locked: ServerProcess) -> None:
    with visiting(browser, locked) as page:
        unlock(page)
        question = page.locator("#question")
        question.focus()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert question.input_value() == "one\ntwo"
        page.keyboard.press("Enter")
        expect(page.locator(".asked")).to_have_text("one\ntwo")
        assert question.input_value() == ""
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".foot")).to_contain_text("stopped")
        page.locator("#talk").focus()
        order = []
        for _ in range(7):
            order.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
            page.keyboard.press("Tab")
        assert order == ["talk", "question", "Options", "clear", "send", "server", "Settings"]
        page.locator("#clear").focus()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "who uses a keyboard sees where it is"
        expect(page.locator("#talk")).to_have_attribute("aria-live", "polite")


def test_a_narrow_screen_shows_one_half_at_a_time(browser: Browser, locked: ServerProcess) -> None:
    def is_within() -> bool:
        return bool(page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"))

    with visiting(browser, locked, **PHONE) as page:
        unlock(page)
        expect(page.locator("#question")).to_be_in_viewport()
        expect(page.locator("#server")).to_be_hidden()
        assert is_within()
        page.locator("#question").fill("Go on.")
        page.get_by_role("button", name="Send").tap()
        wait_for_text(page, 400)
        expect(page.locator("#question")).to_be_in_viewport()
        assert is_within()
        page.get_by_role("button", name="Stop").tap()
        page.get_by_role("button", name="Server").tap()
        expect(page.locator("#chat")).to_be_hidden()
        expect(page.locator("#decode-chart svg")).to_be_in_viewport()
        expect(page.locator("#decode-chart .trace")).to_have_attribute("d", re.compile("^M"))
        page.locator("#settings summary").tap()
        assert is_within()


CONTRAST = """(node) => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (color) => {
    const part = rgb(color).map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const [a, b] = [getComputedStyle(node).color, getComputedStyle(document.documentElement).backgroundColor].map(light);
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), b];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_day_and_by_night(browser: Browser, server: ServerProcess, scheme: str) -> None:
    with visiting(browser, server, color_scheme=scheme) as page:
        for place in ("h1", "#model", "dt >> nth=0", "#blank", ".hint >> nth=0", "summary >> nth=0", "#pool-figures"):
            contrast, paper = page.locator(place).evaluate(CONTRAST)
            assert contrast >= 4.5, place
            assert (paper < 0.05) == (scheme == "dark")


def test_what_is_turned_off_is_said_and_the_rest_is_shown(browser: Browser, server: ServerProcess) -> None:
    with visiting(browser, server) as page:
        page.route("**/metrics", lambda route: route.fulfill(status=501, json={"error": {"message": "off"}}))
        expect(page.locator("#off")).to_contain_text("/metrics")
        expect(page.locator("#slot-list li")).to_have_count(4)
        page.route("**/slots", lambda route: route.fulfill(status=501, json={"error": {"message": "off"}}))
        expect(page.locator("#off")).to_contain_text("/slots and /metrics")


def test_a_server_that_is_away_or_refuses_is_told(browser: Browser, server: ServerProcess) -> None:
    with visiting(browser, server) as page:
        page.route("**/health", lambda route: route.abort())
        expect(page.locator("#status")).to_have_text("no connection")
        page.unroute("**/health")
        expect(page.locator("#status")).to_have_text("ready")
        page.locator("#options summary").click()
        page.get_by_label("Temperature").evaluate("(field) => { field.max = 9; field.value = 5 }")
        say(page, "Hello")
        expect(page.locator(".failure")).to_contain_text("temperature")
        expect(page.locator("#question")).to_have_value("Hello")  # to be asked again
        page.route("**/v1/chat/completions", drop)
        say(page, "Hello")
        expect(page.locator(".failure")).to_have_count(2)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
        say(page, "Hello")
        expect(page.locator(".failure").last).to_contain_text("the server answered with status 502")


def drop(route: Route) -> None:
    route.fulfill(content_type="text/event-stream", body='data: {"error": {"message": "inference backend error"}}\n\n')


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="only `make screenshots` makes them")
def test_screenshots(browser: Browser, server: ServerProcess) -> None:
    """The page under some load, for docs/images."""
    folder = Path(os.environ["SCREENSHOTS"])
    folder.mkdir(exist_ok=True)
    rest = threading.Event()
    people = [threading.Thread(target=write, args=(server.url, number, rest)) for number in range(2)]
    for person in people:
        person.start()
    try:
        size = {"width": 1280, "height": 820}
        with visiting(browser, server, viewport=size) as page, visiting(browser, server, **PHONE) as phone:
            page.wait_for_timeout(1000 * int(os.environ.get("SCREENSHOTS_AFTER_S", "150")))
            for view in (page, phone):
                view.locator("#options summary").click()
                view.get_by_label("Temperature").fill("0")
                view.get_by_label("Most tokens").fill("120")
                view.locator("#options summary").click()
                say(view, "Write a Python function that reverses a string. Keep it short.")
                expect(view.locator(".answer")).to_have_attribute("aria-busy", "false", timeout=600_000)
            page.screenshot(path=folder / "page.png")
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=folder / "page-dark.png")
            phone.screenshot(path=folder / "page-phone.png", scale="css")
            phone.get_by_role("button", name="Server").tap()
            phone.wait_for_timeout(1500)
            phone.screenshot(path=folder / "page-phone-server.png", scale="css")
    finally:
        rest.set()
        for person in people:
            person.join()


def write(url: str, number: int, rest: threading.Event) -> None:
    """A person who asks again and again, with pauses, about the same long text."""
    context = "The lighthouse stood at the end of a long pier. " * 40
    with httpx.Client(base_url=url, timeout=None) as client:
        for turn in range(1000):
            body = {"prompt": f"{context if turn % 2 else ''}Person {number}, day {turn}:", "ignore_eos": True}
            client.post("/v1/completions", json=body | {"max_tokens": 40 + 50 * (turn % 3)})
            if rest.wait(2 * (number + turn % 3)):
                return
