"""The documentation site: built as `make docs` does, then opened from its folder in Chromium."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = [
    f"--{flag}"
    for flag in (
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
]
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs tools/requirements.txt")
    folder = tmp_path_factory.mktemp("site")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 60
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs tools/requirements.txt")
    installed = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        if installed is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium: `make browser`, or install the package chromium")
        # Each launch has a new profile.
        found = playwright.chromium.launch(executable_path=installed, args=FLAGS)
        yield found
        found.close()


class Tab:
    """A page, with all that it complained of and all that it fetched from elsewhere."""

    def __init__(self, browser: Any, width: int, height: int, scheme: str = "light") -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else 0,
        )
        self.page.on(
            "request",
            lambda asked: (
                self.faults.append(asked.url)
                if not asked.url.startswith(("file:", "data:", "blob:"))
                else 0
            ),
        )

    def open(self, file: Path) -> Any:
        self.page.goto(file.as_uri(), wait_until="load")
        return self.page

    def number(self, selector: str) -> float:
        return float(self.page.locator(selector).text_content())

    def set(self, slider: str, value: float) -> None:
        """By the keyboard, as a user would."""
        handle = self.page.locator(f"#{slider}")
        step = float(handle.get_attribute("step") or 1)
        handle.focus()
        moves = round((value - float(handle.input_value())) / step)
        for _ in range(abs(moves)):
            self.page.keyboard.press("ArrowRight" if moves > 0 else "ArrowLeft")
        assert float(handle.input_value()) == pytest.approx(value)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_page_opens(site: Path, browser: Any, size: str, scheme: str) -> None:
    """No error, nothing fetched, no picture missing, nothing wider than the screen."""
    tab = Tab(browser, *SIZES[size], scheme)
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 20
    for file in pages:
        page = tab.open(file)
        width = page.evaluate("document.documentElement.scrollWidth")
        missing = page.evaluate(
            "[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)"
        )
        if file.name != "404.html":  # which has the addresses of a server
            assert (width, missing) == (SIZES[size][0], []), file.name
            assert tab.faults == [], file.name
        tab.faults.clear()


def test_search_from_a_folder(site: Path, browser: Any) -> None:
    tab = Tab(browser, *SIZES["desktop"])
    page = tab.open(site / "index.html")
    page.locator("input.md-search__input").click()
    page.keyboard.type("certificate")
    page.locator(".md-search-result__item a").first.wait_for()
    page.locator(".md-search-result__item a").first.click()
    page.wait_for_url("**/transform.html*")
    assert tab.faults == []


@pytest.fixture(params=SIZES)
def tab(site: Path, browser: Any, request: pytest.FixtureRequest) -> Iterator[Tab]:
    tab = Tab(browser, *SIZES[request.param])
    tab.open(site / "explore.html")
    yield tab
    assert tab.faults == []


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(weights) for x in weights]


def test_weights_follow_the_sliders(tab: Tab) -> None:
    for keys, query, temperature, bias in ((24, 1, -0.5, 0), (10, -2, 0, 0), (10, -2, 0, 5)):
        for slider, value in zip(
            ("keys", "query", "temperature", "bias"), (keys, query, temperature, bias), strict=True
        ):
            tab.set(slider, value)
        places = [-2 + 4 * (j + 0.5) / keys for j in range(keys)]
        biases = [-bias * (s - 0.5) ** 2 for s in places]
        divided = 10**temperature
        dot = softmax([query * s / divided + b for s, b in zip(places, biases, strict=True)])
        near = [-((query - s) ** 2) / 2 / divided + b for s, b in zip(places, biases, strict=True)]
        for head, weights in (("dot", dot), ("gaussian", softmax(near))):
            titles = tab.page.locator(f"#{head} rect title").all_text_contents()
            shown = [float(title.split(":")[1]) for title in titles]
            assert shown == pytest.approx(weights, abs=6e-4)
            assert tab.number(f"#{head} .most") == pytest.approx(max(weights), abs=6e-4)
        assert tab.number("#hardmax .most") == 1


def test_a_click_moves_a_slider(tab: Tab) -> None:
    box = tab.page.locator("#query").bounding_box()
    tab.page.mouse.click(box["x"] + 2, box["y"] + box["height"] / 2)
    assert tab.number("label:has(#query) output") == -3
    titles = tab.page.locator("#dot rect title").all_text_contents()
    shown = [float(title.split(":")[1]) for title in titles]
    assert shown[0] == max(shown)  # the smallest key is on top


def test_the_table_gets_better_with_nodes(tab: Tab) -> None:
    errors = []
    for panels, nodes in ((1, 3), (2, 6), (4, 8), (8, 16)):
        tab.set("panels", panels)
        tab.set("nodes", nodes)
        assert tab.page.locator("#table circle").count() == panels * nodes
        assert tab.page.locator("#table line").count() == panels + 1
        errors.append(tab.number("#error"))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2
    assert errors[-1] < 1e-12


def test_ink_follows_the_theme(site: Path, browser: Any) -> None:
    """The curve is dark on light paper, and light on dark paper."""
    for scheme in ("light", "dark"):
        page = Tab(browser, *SIZES["desktop"], scheme).open(site / "explore.html")
        ink = page.evaluate("getComputedStyle(document.querySelector('#table .ink')).stroke")
        red = int(ink.partition("(")[2].partition(",")[0])
        assert (red > 128) == (scheme == "dark"), ink
