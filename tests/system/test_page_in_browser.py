"""The page of a run in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch

import forked
from hostile_pages import FIELDS, PAYLOADS, hostile_run
from made_runs import make_run
from paceline.monitor import media
from paceline.run.folder import RunFolder
from paceline.tools.watch.page_server import PageServer, WatchedRuns
from paceline.tools.watch.report import standalone_page, write_report
from samples import sample
from served import serving, serving_with

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="starts a browser: set PACELINE_SYSTEM_TESTS=1"
)
PARTS = """
    Loss, accuracy (validation), Learning rate, Gradient norm, Throughput, MFU, Data wait, Step time, Layout,
    Ranks over time, Where the time went, What happened when, Checkpoints, Recipe, Environment, Log of
"""
LIVE = """
import time, torch, paceline

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, n):
        time.sleep(0.01)
        return torch.full((4,), n / 1e5), torch.zeros(1)

model, loss = torch.nn.Linear(4, 1), torch.nn.MSELoss()
paceline.Trainer(model, criterion=loss, batch=8, log_every=1, run="live").train(Slow(), epochs=1)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from system import browser

    with browser.running() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "good", steps=3000, ranks=4)
    make_run(root / "other", steps=2000, ranks=4, seed=1)
    make_run(root / "bad", steps=500, ranks=2, failed=True)
    return root


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[PageServer]:
    with serving([], runs) as server:
        yield server


@contextmanager
def page_of(browser: Browser, server: PageServer, *names: str, scheme: str = "light") -> Iterator[Page]:
    """The page of one run, or of several over each other. It must neither fail nor ask another machine."""
    from system import browser as browsers

    ids = [run["id"] for name in names for run in server.runs.listed()["runs"] if run["name"] == name]
    route = "list" if not ids else f"run={ids[0]}" if len(ids) == 1 else f"compare={','.join(ids)}"
    with browsers.opened(browser, f"{server.url}#{route}", scheme=scheme) as (page, observed):
        yield page
        assert observed.errors == [] and observed.dialogs == []
        asked = {urlsplit(url).netloc for url in observed.requests if not url.startswith("blob:")}
        assert asked == {f"127.0.0.1:{server.server_port}"}


def described(page: Page, title: str) -> str:
    """What a chart says to people who can't see it: its last values and its range."""
    label = page.locator(f'canvas[aria-label^="{title}: "]').first.get_attribute("aria-label")
    return label or ""


def until(page: Page, condition: Callable[[], object]) -> None:
    """Playwright's own `wait_for_function` evaluates a string, which the policy of the page forbids."""
    from system.browser import DEADLINE

    deadline = time.monotonic() + DEADLINE / 1000
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(30)


def shown_step(page: Page) -> int:
    return int(page.locator('.tile:has(> div:text-is("step")) .big').inner_text().replace(",", "").replace("–", "0"))


def steps_in(label: str) -> tuple[int, int]:
    found = re.search(r"; step ([\d,]+) to step ([\d,]+)$", label)
    assert found is not None, label
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def ink(page: Page, selector: str) -> int:
    """The number of pixels of a canvas that are not transparent."""
    count: int = page.eval_on_selector(
        selector,
        "canvas => { const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " let count = 0; for (let n = 3; n < data.length; n += 4) count += data[n] > 0; return count; }",
    )
    return count


def drag(page: Page, title: str, start: float, end: float) -> None:
    chart = page.locator(f'canvas[aria-label^="{title}: "]').first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 90, steps=4)
    page.mouse.up()


def test_every_part_of_a_run_is_shown(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "good") as page:
        page.wait_for_selector('canvas[aria-label*="of 4 ranks"]')
        titles = page.locator("h3").all_text_contents()
        for title in PARTS.strip().split(","):
            assert title.strip() in titles
        assert described(page, "Loss").endswith("; step 1 to step 3,000")
        assert (
            ink(page, 'canvas[aria-label^="Loss: "]') > 2000 and ink(page, 'canvas[aria-label*="of 4 ranks"]') > 20_000
        )
        text = page.inner_text("main")
        for said in ("fsdp: 4 ranks on 1 node", "has been 1.3 × slower", "recipe.yaml:3"):
            assert said in text


@pytest.mark.nightly
def test_zoom_pan_and_crosshair(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "good") as page:
        drag(page, "Loss", 0.4, 0.6)
        until(page, lambda: re.search(r"; step 1,\d+ to step 1,", described(page, "Loss")))
        zoomed = described(page, "Loss")
        assert described(page, "Learning rate").split("; ")[1] == zoomed.split("; ")[1], "charts share their range"
        chart = page.locator('canvas[aria-label^="Loss: "]').first
        chart.focus()
        page.wait_for_timeout(600)  # the server has sent more points of this range, and none of others
        chart.press("Shift+ArrowRight")
        until(page, lambda: described(page, "Loss") != zoomed)
        low, high = steps_in(zoomed)
        moved = steps_in(described(page, "Loss"))
        assert moved[0] - low == pytest.approx(0.2 * (high - low), rel=0.1), "the range moved by a fifth"
        chart.press("-")
        until(
            page, lambda: steps_in(described(page, "Loss"))[1] - steps_in(described(page, "Loss"))[0] > high - low + 50
        )
        assert steps_in(described(page, "Loss"))[0] > 1
        chart.press("ArrowLeft")
        assert page.locator(".tip:visible").first.inner_text().startswith("step ")
        chart.press("Home")
        until(page, lambda: described(page, "Loss").endswith("step 1 to step 3,000"))
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
        tip = page.locator(".tip:visible").first.inner_text()
        assert re.match(r"step 1,[45]\d\d\b", tip) and "training" in tip and "validation" in tip


@pytest.mark.nightly
def test_axis_smoothing_and_logarithmic_scale(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "good") as page:
        page.click("button[data-mode=time]")
        until(page, lambda: "after the start" in described(page, "Loss"))
        page.click("button[data-mode=samples]")
        until(page, lambda: "96,000 samples" in described(page, "Loss"))
        before = page.locator('canvas[aria-label^="Loss: "]').first.screenshot()
        page.locator('section:has(> header > h3:text-is("Loss")) button.small').click()
        page.wait_for_timeout(100)
        assert page.locator('canvas[aria-label^="Loss: "]').first.screenshot() != before


@pytest.mark.nightly
def test_keyboard(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "good") as page:
        page.keyboard.press("?")
        assert page.locator("dialog[open]").inner_text().startswith("Keyboard")
        page.keyboard.press("Escape")
        page.keyboard.press("x")
        until(page, lambda: page.evaluate("document.querySelector('button[data-mode=time]').ariaPressed === 'true'"))
        page.keyboard.press("t")
        until(page, lambda: page.evaluate("document.documentElement.dataset.theme === 'dark'"))
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "log-search"
        page.keyboard.type("step 59: x")  # letters are typed, not commands
        page.keyboard.press("Escape")
        page.keyboard.press("p")
        until(page, lambda: page.evaluate("document.querySelector('.status').textContent === 'paused'"))
        page.keyboard.press("6")
        until(page, lambda: page.evaluate("scrollY > 500"))
        page.keyboard.press("g")
        page.wait_for_selector('a:has-text("other")')


@pytest.mark.nightly
def test_light_and_dark(browser: Browser, server: PageServer) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with page_of(browser, server, "good", scheme="dark") as page:
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        dark = page.evaluate(background)
        page.click('button[aria-label="light or dark"]')
        until(page, lambda: page.evaluate(background) != dark)
        page.reload()
        page.wait_for_selector("main")
        assert page.evaluate("document.documentElement.dataset.theme") == "light", "the choice is kept"


@pytest.mark.nightly
def test_search_in_the_log(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "good") as page:
        page.select_option('select[aria-label="rank"]', "2")
        page.wait_for_selector('.log div:has-text("rank 2 says")')
        page.fill("#log-search", "step 5:")
        until(page, lambda: page.evaluate("document.querySelectorAll('.log div').length === 1"))
        assert page.locator(".log mark").inner_text() == "step 5:"
        page.fill("#log-search", "nothing like this")
        until(page, lambda: page.evaluate("document.querySelectorAll('.log div').length === 0"))


@pytest.mark.nightly
def test_a_rank_beside_the_others(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "good") as page:
        table = page.locator('canvas[aria-label*="of 4 ranks"]')
        table.focus()
        table.press("ArrowDown")
        table.press("ArrowDown")
        page.wait_for_selector('canvas[aria-label^="Rank 1: own time, relative: rank 1 1.2"]')
        page.click('button[data-quantity="memory"]')
        page.wait_for_selector('canvas[aria-label^="memory of 4 ranks, from 6"]')


@pytest.mark.nightly
def test_a_failed_run(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server, "bad") as page:
        alert = page.locator("[role=alert]").inner_text()
        assert "Failed: exception on rank 1 after step 500" in alert and "illegal memory access" in alert
        assert page.locator('select[aria-label="rank"]').input_value() == "1"


@pytest.mark.nightly
def test_the_list_and_runs_over_each_other(browser: Browser, server: PageServer) -> None:
    with page_of(browser, server) as page:
        for name in ("good", "other"):
            page.check(f'input[aria-label="choose {name}"]')
        page.click("text=Compare 2 runs")
        page.uncheck('label:text-is("group seeds") input')
        page.wait_for_selector('canvas[aria-label^="Loss (training): good 2."]')
        assert "good" in described(page, "Loss (training)") and "other" in described(page, "Loss (training)")
        results = page.locator("table").first.inner_text()
        assert "best validation accuracy" in results and "3,000 of 3,000" in results
        assert "seed" in page.locator("#settings").inner_text()


def names_in(page: Page) -> list[str]:
    """The runs of the list, in their order."""
    return page.locator(".runs tbody td:nth-child(2)").all_text_contents()


def test_the_list_is_searched_and_sorted_and_keeps_its_address(browser: Browser, tmp_path: Path) -> None:
    from system import browser as browsers

    for name, rate, tags in (("a", 0.01, "[old, vit]"), ("b", 0.3, "[vit]"), ("c", 0.02, "[gpt]")):
        make_run(tmp_path / name, steps=40, settings=[f"optimizer.lr={rate}", f"tags={tags}", "save_best=accuracy"])
    with serving([], tmp_path) as server, browsers.opened(browser, f"{server.url}#list") as (page, observed):
        page.wait_for_selector("canvas.sparkline")
        assert "validation accuracy, step 40" in page.locator(".runs").inner_text()
        page.click("text=Columns")
        page.check('label:text-is("optimizer.lr")')
        page.uncheck('label:text-is("speed")')
        page.keyboard.press("Escape")
        page.click('button.sort:text-is("optimizer.lr")')
        until(page, lambda: names_in(page) == ["a", "c", "b"])
        page.click('button.sort:text-is("optimizer.lr ↑")')
        until(page, lambda: names_in(page) == ["b", "c", "a"])
        page.locator('button.tag:text-is("vit")').first.click()
        until(page, lambda: names_in(page) == ["b", "a"])
        page.reload()
        until(page, lambda: names_in(page) == ["b", "a"])
        titles = page.locator(".runs thead button").all_text_contents()
        assert "optimizer.lr ↓" in titles and "speed" not in titles
        page.click('.runs a:text-is("b")')
        page.wait_for_selector('.tile:has-text("best validation accuracy")')
        page.click('nav a:text-is("Runs")')
        page.fill("#list-search", "optimizer.lr=0.02 batch=16")
        until(page, lambda: names_in(page) == ["c"])
        page.fill("#list-search", "nothing")
        page.wait_for_selector("text=No run matches the search.")
        assert observed.errors == []


def test_seeds_are_a_band_and_equal_curves_are_both_seen(browser: Browser, tmp_path: Path) -> None:
    from system import browser as browsers

    for name, seed, rate in (("slow-0", 0, 0.1), ("slow-1", 1, 0.1), ("fast-0", 0, 0.2)):
        make_run(tmp_path / name, steps=60, seed=seed, settings=[f"optimizer.lr={rate}"])
    with serving([], tmp_path) as server:
        ids = {run["name"]: run["id"] for run in server.runs.listed()["runs"]}
        url = f"{server.url}#compare={ids['slow-0']},{ids['slow-1']},{ids['fast-0']}"
        with browsers.opened(browser, url) as (page, observed):
            page.wait_for_selector('canvas[aria-label^="Loss (training): slow · 2 seeds "]')
            settings = page.locator("#settings tbody tr").all_inner_texts()
            assert [row.split("\t") for row in settings] == [["optimizer.lr", "0.1", "0.2"], ["seed", "0, 1", "0"]]
            assert page.locator("#results tbody tr").first.inner_text().split() == [
                "runs",
                "slow-0",
                "slow-1",
                "fast-0",
            ]
            page.uncheck('label:text-is("group seeds") input')
            legend = page.locator('section:has(> header > h3:text-is("Loss (training)")) .legend')
            until(page, lambda: "(same as" in legend.inner_text())
            assert re.match(r"slow-0 2\.\d+\s*slow-1 2\.\d+\s*fast-0 2\.\d+ \(same as slow-0\)", legend.inner_text())
            assert observed.errors == []


@pytest.mark.nightly
def append_media(folder: RunFolder, steps: Sequence[int]) -> None:
    for step in steps:
        values = {"image": torch.full((1, 2, 4), step / 100), "text": f"<b>step {step}", "histogram": [0.0, step]}
        with folder.media.open("a") as file:
            for kind, value in values.items():
                file.write(json.dumps(media.record(folder, kind, f"my {kind}", value, step)) + "\n")


def seen(page: Page) -> tuple[str, int, str]:
    """The text, the gray of the image and the description of the histogram that are shown."""
    gray = """image => { const canvas = document.createElement('canvas'), context = canvas.getContext('2d');
        context.drawImage(image, 0, 0); return context.getImageData(1, 1, 1, 1).data[0]; }"""
    label = page.get_attribute("#histograms canvas", "aria-label") or ""
    return page.inner_text("#texts pre"), page.eval_on_selector("#images img", gray), label.split(":")[0]


def test_images_texts_and_histograms_by_step(browser: Browser, tmp_path: Path) -> None:
    from system import browser as browsers

    folder = make_run(tmp_path / "run", steps=50)
    with serving([folder], tmp_path) as server, page_of(browser, server, "run") as page:
        page.wait_for_selector(".log div")
        assert page.locator("#images, #texts, #histograms").count() == 0 and "Images" not in page.inner_text("nav")
        append_media(folder, [20, 40])
        page.wait_for_selector("#images img[src]")
        until(page, lambda: seen(page) == ("<b>step 40", 102, "my histogram at step 40"))
        assert [word for word in page.inner_text("nav").split() if word in ("Images", "Texts", "Histograms")] != []
        for kind in ("images", "texts", "histograms"):
            page.focus(f"#{kind} input")
            page.keyboard.press("Home")
        until(page, lambda: seen(page) == ("<b>step 20", 51, "my histogram at step 20"))
        append_media(folder, [60])
        until(page, lambda: "of 60" in page.inner_text("#texts"))
        assert seen(page)[0] == "<b>step 20"  # whoever looks at a step stays there
        page.click("#images button.image")
        page.wait_for_selector("dialog[open] img")
        page.keyboard.press("Escape")
        write_report([folder], tmp_path / "report.html")
    with browsers.opened(browser, f"file://{tmp_path}/report.html") as (page, observed):
        page.wait_for_selector("#images img[src]")
        until(page, lambda: seen(page) == ("<b>step 60", 153, "my histogram at step 60"))
        assert observed.errors == []


def test_the_page_of_a_sweep(browser: Browser, tmp_path: Path) -> None:
    """In one file, and live above the runs of its trials."""
    from system import browser as browsers

    def trial(number: int, value: float | None, lr: float, **more: Any) -> dict[str, Any]:
        curve = [[10, 2.0], [20, value]] if value else []
        about = {"state": "complete" if value else "failed", "steps": 20, "seconds": 3.0, "verdict": ""}
        return {"number": number, "value": value, "params": {"lr": lr, "act": "relu"}, "curve": curve, **about, **more}

    trials = [trial(1, 0.5, 1e-3), trial(0, 0.75, 1e-2), trial(2, None, 1e-4, verdict="<b>out of memory</b>")]
    space = [{"key": "lr", "log": True, "choices": None}, {"key": "act", "log": False, "choices": ["relu", None]}]
    about = {"title": "mlp-sweep", "metric": "loss", "minimizes": True, "counts": "2 complete, 1 failed"}
    values = {**about, "space": space, "importances": {"lr": 0.75}, "trials": trials}
    (tmp_path / "report.html").write_bytes(standalone_page({"sweep": values}))
    with browsers.opened(browser, f"file://{tmp_path}/report.html") as (page, observed):
        titles = page.locator("h3").all_text_contents()
        assert titles == ["History", "Curves", "loss by lr", "loss by act", "Importance of parameters"]
        assert "0.5\ntrial 1" in page.inner_text(".tiles") and "<b>out of memory</b>" in page.inner_text(".trials")
        until(page, lambda: described(page, "loss by lr").startswith("loss by lr: best 0.5, trials 0.75; lr "))

        def numbers() -> list[str]:
            return page.locator(".trials tbody tr > td:first-child").all_text_contents()

        assert numbers() == ["1", "0", "2", ""]
        page.click("th:has-text('lr') button")
        assert numbers() == ["2", "", "1", "0"] and page.get_attribute("th:has-text('lr')", "aria-sort") == "ascending"
        page.click("th:has-text('loss') button")
        page.click("th:has-text('loss') button")
        assert numbers() == ["2", "", "0", "1"]
        assert observed.errors == [] and [urlsplit(url).scheme for url in observed.requests] == ["file"]
    for number in range(2):
        make_run(tmp_path / f"000{number}", steps=20)
    server = PageServer(WatchedRuns([], tmp_path, lambda: values))
    with serving_with(server), browsers.opened(browser, server.url) as (page, observed):
        page.wait_for_selector(".tiles.sweep")
        trials.insert(0, trial(3, 0.25, 2e-3))
        until(page, lambda: "0.25\ntrial 3" in page.inner_text(".tiles"))
        page.click(".trials a:text-is('1')")
        page.wait_for_selector(".log div")
        page.click("nav a:has-text('Sweep')")
        page.click("nav a:has-text('Runs')")
        page.wait_for_selector("text=0001")
        assert observed.errors == []


def test_a_report_works_without_a_server(browser: Browser, runs: Path, tmp_path: Path) -> None:
    from system import browser as browsers

    write_report([RunFolder(runs / "good")], tmp_path / "report.html")
    with browsers.opened(browser, f"file://{tmp_path}/report.html") as (page, observed):
        page.wait_for_selector('canvas[aria-label*="of 4 ranks"]')
        drag(page, "Loss", 0.4, 0.6)
        until(page, lambda: re.search(r"; step 1,\d+ to step 1,", described(page, "Loss")))
        page.fill("#log-search", "step 5:")
        until(page, lambda: page.evaluate("document.querySelectorAll('.log div').length === 1"))
        page.emulate_media(media="print")
        assert page.pdf()[:4] == b"%PDF"
        assert observed.errors == [] and [urlsplit(url).scheme for url in observed.requests] == ["file"]


@pytest.mark.nightly
def test_a_live_run_gets_new_points(browser: Browser, tmp_path: Path) -> None:
    """Of two ranks, without reloading; and its end is noticed."""
    from system import browser as browsers

    (tmp_path / "script.py").write_text(LIVE)
    with (tmp_path / "output").open("wb") as output:
        pid = forked.start(
            lambda: forked.command("launch", "-n", "2", "script.py"), tmp_path, output.fileno(), output.fileno()
        )
    folder, deadline = RunFolder(tmp_path / "runs" / "live"), time.monotonic() + 100
    try:
        while not folder.metrics.exists():
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        with serving([folder], tmp_path) as server, browsers.opened(browser, server.url) as (page, observed):
            for _ in range(2):
                last = json.loads(folder.metrics.read_text().splitlines()[-2])["step"]
                until(page, lambda after=last: shown_step(page) > after)
                shown = int(described(page, "Loss").rpartition("step ")[2].replace(",", ""))
                assert shown > last, "the chart has the new points as well"
            assert page.locator(".pill").inner_text() == "● running"
            page.locator("#logs").scroll_into_view_if_needed()
            with folder.rank_log(0).open("a") as log:
                log.write("a line of this moment\n")
            page.wait_for_selector('.log div:has-text("a line of this moment")')
            os.killpg(pid, signal.SIGTERM)
            until(page, lambda: page.evaluate("document.querySelector('.pill').textContent.includes('interrupted')"))
            assert observed.errors == []
    finally:
        os.killpg(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("kind", "payloads"),
    [("page", PAYLOADS[: sample(2, len(PAYLOADS))]), pytest.param("report", PAYLOADS[:4], marks=pytest.mark.nightly)],
)
def test_hostile_text_runs_no_script(browser: Browser, tmp_path: Path, kind: str, payloads: list[str]) -> None:
    """Every payload in every text of a run: on a page, where it must be seen as text, and in a report."""
    from system import browser as browsers

    assert len(PAYLOADS) * len(FIELDS) >= 200
    folders = [hostile_run(tmp_path / f"run {n}", payload) for n, payload in enumerate(payloads)]
    with serving(folders, tmp_path) as server:
        for n, (folder, payload) in enumerate(zip(folders, payloads, strict=True)):
            url = f"{server.url}#run={n}"
            server.runs.listed()
            if kind == "report":
                write_report([folder], tmp_path / "report.html")
                url = f"file://{tmp_path}/report.html"
            with browsers.opened(browser, url) as (page, observed):
                page.wait_for_selector(".log div")
                page.wait_for_selector("#texts pre")
                page.check('label:has-text("defaults") input')
                shown = page.inner_text("body")
                assert page.evaluate("window.hacked") is None and observed.dialogs == [], payload
                assert observed.errors == [], payload
                assert shown.count(payload[:12]) >= 8, f"{payload!r} is not shown as text"
                assert page.locator("script").count() == (2 if kind == "report" else 1)
                assert page.locator("img:not(.image > img), iframe, object, embed, svg, link, base, form").count() == 0
        with browsers.opened(browser, f"{server.url}#list") as (page, observed):
            page.wait_for_selector(".tag")
            page.click("text=Columns")
            for box in page.locator(".choices input").all():
                box.check()
            shown = page.inner_text("body")
            assert page.evaluate("window.hacked") is None and observed.dialogs == observed.errors == []
            assert all(shown.count(payload[:12]) >= 4 for payload in payloads)
            assert page.locator("script").count() == 1 and page.locator("img, iframe, svg, base, form").count() == 0
