"""The dashboard in a headless Chromium: without network, filtered, texts shown as texts, narrow, dark, accessible, live."""

import html
import json
import shutil
import threading

import pytest

from dashboard_store import MARKUP, make_store
from kvlab.dashboard import Server, Store, write_dashboard
from test_tables import Disk, questions

pytest.importorskip("plotly", reason="the page needs plotly: pip install 'kvlab[dashboard]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="drives the browser: pip install 'kvlab[dev]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="carries axe-core: pip install 'kvlab[dev]'")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine (Debian: apt-get install chromium)"),
]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Real runs; one output is replaced by one that would be markup, which no model can be made to write."""
    outputs = make_store(tmp_path_factory.mktemp("store"))
    for file in outputs.rglob("streaming_llm/30pct-*/samples.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        records = [{**one, "output": MARKUP} if one["id"] == "<b>one</b>" else one for one in records]
        file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return outputs


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(outputs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "dashboard.html"
    write_dashboard(outputs, path)
    return path


class Watched:
    """A page and what went wrong on it: messages on the console, and requests to anything but itself."""

    def __init__(self, browser, address, **settings):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        self.page = self.context.new_page()
        self.wrong = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, address))
        self.page.goto(address)
        self.page.wait_for_selector("#quality .main-svg", state="attached")
        self.page.evaluate("drawAll()")

    def _asked(self, url, address):
        if not url.startswith(("data:", "blob:", address)):
            self.wrong.append(url)

    def __enter__(self):
        return self.page

    def __exit__(self, *error):
        self.context.close()
        assert error[0] or not self.wrong, self.wrong


def drawn(page, place):
    """Names and numbers of points of what a figure shows."""
    return page.evaluate(f"document.querySelector('{place}').data.map((one) => [one.name, one.x.length])")


def violations(page):
    found = axe.Axe().run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]


def test_figures_follow_the_filters(browser, file):
    with Watched(browser, file.as_uri()) as page:
        assert drawn(page, "#quality")[1:] == [["full", 1], ["h2o", 2], ["streaming_llm", 2]]
        panels = page.locator("#budgets .js-plotly-plot")
        assert panels.count() == 2 and page.locator("#analyses .js-plotly-plot").count() == 5
        assert page.locator("#table tbody tr").count() == 5 and page.locator("#differences tbody tr").count() == 4
        page.get_by_label("figures show").select_option("delta")
        page.evaluate("drawAll()")
        full = page.evaluate("document.querySelector('#quality').data[1]")
        assert (full["name"], full["y"]) == ("full", [0]), "differences to itself"
        page.get_by_label("figures show").select_option("value")
        page.get_by_label("Policy contains").fill("h2o 30")
        assert page.locator("#table tbody tr").count() == 2, "the full cache stays"
        page.evaluate("drawAll()")
        assert [name for name, _ in drawn(page, "#quality")][1:] == ["full", "h2o"]
        assert drawn(page, "#quality")[2] == ["h2o", 1]
        page.get_by_role("button", name="Reset filters").click()
        page.get_by_role("button", name="streaming_llm").click()
        page.get_by_label("Task", exact=True).select_option("prompts")
        page.evaluate("drawAll()")
        assert panels.count() == 1 and [name for name, _ in drawn(page, "#quality")][1:] == ["full", "h2o"]
        assert page.locator("#count").inner_text() == "3 of 10 cells"
        page.reload()
        assert page.get_by_label("Task", exact=True).input_value() == "prompts", "the address holds the filters"
        assert page.locator("#table tbody tr").count() == 3


def test_significance_is_seen_and_units_of_budgets_are_not_joined(browser, tmp_path):
    disk = Disk(tmp_path / "outputs")
    disk(questions([1] * 12))
    disk(questions([0] * 10 + [1] * 2), "h2o", 0.5)
    disk(questions([0] + [1] * 11), "h2o", 0.2)
    disk(questions([0] * 12), "h2o", budget={"tokens": 64}, budget_label="64 tokens")
    write_dashboard(tmp_path / "outputs", tmp_path / "page.html")
    with Watched(browser, (tmp_path / "page.html").as_uri()) as page:
        assert drawn(page, "#quality")[1:] == [["full", 1], ["h2o", 2], ["h2o", 1]]
        found = page.evaluate("document.querySelector('#quality').data[1]")
        assert found["error_y"]["array"] == [0] and 0.2 < found["error_y"]["arrayminus"][0] < 0.3, "Wilson's, of 12 of 12"
        cells = page.locator("#differences tbody td")
        assert [text.split()[0] for text in cells.all_inner_texts()] == ["▼", "▼", "≈"]
        assert "McNemar p <0.001" in cells.first.inner_text() and cells.first.get_attribute("class") == "clear"


def test_texts_are_shown_as_texts(browser, file):
    watched = Watched(browser, file.as_uri())
    with watched as page:
        page.get_by_label("Task", exact=True).select_option("prompts")
        page.locator("#cell").select_option(label="streaming_llm, 30 %")
        page.get_by_role("button", name="<b>one</b>").click()
        shown = page.locator("#sample")
        assert shown.inner_text().count(MARKUP) == 2, "in the prompt and as the output"
        assert "Right answer" in shown.inner_text() and "Full cache" in shown.inner_text()
        assert page.locator("#sample img, #sample script, #sample-list b").count() == 0
        page.wait_for_timeout(100)
        assert page.title() == "kvlab dashboard" and not watched.wrong
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 2'}))")
        assert page.title() == "kvlab dashboard", "no script runs but the page's own"
        assert "Content Security Policy" in watched.wrong.pop()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_narrow_dark_and_accessible(browser, file, width, scheme):
    with Watched(browser, file.as_uri(), viewport={"width": width, "height": 844}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        back = "getComputedStyle(document.body).backgroundColor"
        light, dark = "rgb(246, 247, 249)", "rgb(14, 18, 24)"
        assert page.evaluate(back) == {"light": light, "dark": dark}[scheme]
        assert violations(page) == []
        page.locator("#provenance summary").first.click()
        page.get_by_role("button", name="theme").click()
        assert page.evaluate(back) == {"light": dark, "dark": light}[scheme]
        page.evaluate("drawAll()")
        assert violations(page) == []
        assert "transformers" in page.locator("#provenance dl").first.inner_text()


def test_it_can_be_used_by_keyboard(browser, file):
    with Watched(browser, file.as_uri()) as page:
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main", "the link to the results comes first"
        page.locator("#sample-list button").nth(1).focus()
        page.keyboard.press("Enter")
        chosen = page.locator("#sample-list button").nth(1)
        assert chosen.get_attribute("aria-current") == "true" and chosen.evaluate("(one) => one === document.activeElement")
        assert page.locator("#sample h3").inner_text() == chosen.locator("span").first.inner_text()


def test_a_served_page_shows_new_results(browser, outputs, tmp_path):
    folder = tmp_path / "outputs"
    shutil.copytree(outputs / "debug", folder / "debug")
    (late,) = folder.rglob("perplexity/prompt/h2o/60pct-*")
    shutil.move(late, tmp_path / "late")
    with Server(Store(folder), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with Watched(browser, server.address) as page:
            assert "9 of 9 cells" in page.locator("#count").inner_text()
            shutil.move(tmp_path / "late", late)
            page.evaluate("poll()")
            assert "10 of 10 cells" in page.locator("#count").inner_text()
            page.evaluate("(async () => { while (!fetched.size) await new Promise((go) => setTimeout(go, 20)); })()")
            assert page.locator("#sample-list button").count() > 0, "with whole texts, from the server"
            page.evaluate("poll()")
            assert "Live" in page.locator("#status").inner_text()
        server.shutdown()


@pytest.mark.slow
def test_it_works_within_another_page(browser, file, tmp_path):
    """As W&B and notebooks show it: in a frame that has no origin, no address of its own and no storage."""
    frame = '<iframe width="1280" height="900" sandbox="allow-scripts" srcdoc="'
    (tmp_path / "frame.html").write_text(f'{frame}{html.escape(file.read_text())}"></iframe>')
    page, wrong = browser.new_page(), []
    page.set_default_timeout(120_000)  # a busy machine takes long to read the page as an attribute
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((tmp_path / "frame.html").as_uri(), wait_until="commit")
    frame = page.frame_locator("iframe")
    frame.locator("#quality .main-svg").first.wait_for(state="attached")
    frame.locator("#search").fill("h2o 30")
    assert frame.locator("#count").inner_text() == "4 of 10 cells"
    frame.locator("#theme").click()
    page.close()
    assert not wrong
