from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from maml_rl.report import write_report
from tests.report.chromium import Browser

# A picture is loaded when it has a size; a video when its first frame is decoded.
PICTURES = """
Promise.all([...document.querySelectorAll('img, video')].map(async (element) => {
    if (element.tagName === 'IMG') { await element.decode(); return element.naturalWidth; }
    if (element.readyState < 2) await new Promise((resolve) => {
        element.addEventListener('loadeddata', resolve); element.addEventListener('error', resolve);
    });
    return element.error ? element.error.message : element.videoWidth;
}))
"""
# Elements that reach beyond the page, unless they can be scrolled within it.
TOO_WIDE = """
return [...document.body.querySelectorAll('*')].filter((element) =>
    !element.closest('svg svg, .scroll') && element.getBoundingClientRect().right > innerWidth + 1
).map((element) => element.tagName + '.' + element.getAttribute('class'))
"""
# Frames whose content is wider: how many gradients, which show the edges, and whether the Tab key reaches them.
SCROLLING = """
return [...document.querySelectorAll('*')].filter((element) =>
    getComputedStyle(element).overflowX === 'auto' && element.scrollWidth > element.clientWidth
).map((element) => [
    getComputedStyle(element).backgroundImage.split('linear-gradient').length - 1, element.tabIndex, element.ariaLabel
])
"""
TEXT_COLOR = "return getComputedStyle(document.querySelector('h1')).color"
PAGE_COLOR = "return getComputedStyle(document.body).backgroundColor"
SMALLEST_TEXT = """
return Math.min(...[...document.querySelectorAll('svg text')].filter((text) => text.getClientRects().length)
    .map((text) => text.getBoundingClientRect().height))
"""


@pytest.fixture(scope="module")
def page(navigation_runs: Path, cheetah_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report([navigation_runs, cheetah_run], folder / "report.html", num_tasks=4, num_workers=0)


@pytest.fixture(scope="module")
def page_without_comparison(navigation_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report([navigation_runs], folder / "report.html", num_tasks=4, num_workers=0)


def brightness(color: str) -> float:
    channels = color[color.index("(") + 1 : -1].split(",")[:3]
    return sum(float(channel) for channel in channels) / (3 * 255)


@pytest.mark.slow
@pytest.mark.usefixtures("opengl")
@pytest.mark.timeout(300)
def test_page_loads_without_an_error_or_a_missing_picture(page: Path, browser: Browser) -> None:
    for width, dark in product((360, 1280), (False, True)):
        browser.open(page, width=width, dark=dark)
        widths = browser.wait(PICTURES)
        # One or two videos: all four tasks may have the same direction; otherwise two are shown.
        assert len(widths) == 2, (width, dark)
        assert all(isinstance(shown, int) and shown >= 480 for shown in widths), (width, dark, widths)
        assert browser.complaints() == [], (width, dark)
        loaded = "performance.getEntriesByType('resource').filter(entry => !entry.name.startsWith('data:'))"
        assert browser.run(f"return {loaded}") == [], (width, dark)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_page_fits_its_width_and_its_texts_can_be_read(page_without_comparison: Path, browser: Browser) -> None:
    for width in (360, 768, 1280):
        browser.open(page_without_comparison, width=width, dark=False)
        assert browser.run(TOO_WIDE) == [], width
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(SMALLEST_TEXT) >= 9, width
        assert browser.complaints() == [], width


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tables_that_scroll_show_it_and_can_be_scrolled_by_keyboard(
    page_without_comparison: Path, browser: Browser
) -> None:
    browser.open(page_without_comparison, width=360, dark=False)
    frames = browser.run(SCROLLING)
    assert frames, "the table of returns is wider than a phone"
    for shadows, tab_index, label in frames:
        assert shadows == 4
        assert tab_index == 0
        assert label


@pytest.mark.timeout(300)
def test_page_is_dark_where_the_reader_prefers_it(page_without_comparison: Path, browser: Browser) -> None:
    shades = {}
    for dark in (False, True):
        browser.open(page_without_comparison, width=1280, dark=dark)
        shades[dark] = [brightness(browser.run(script)) for script in (PAGE_COLOR, TEXT_COLOR)]
    assert shades[False][0] > 0.9 > 0.3 > shades[False][1]
    assert shades[True][0] < 0.2 < 0.8 < shades[True][1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_page_loads_nothing_but_itself(page_without_comparison: Path, browser: Browser) -> None:
    browser.open(page_without_comparison, width=1280, dark=False)
    assert urlsplit(browser.driver.current_url).scheme == "file"
    assert browser.run("return document.scripts.length") == 0
    assert browser.run("return [...document.querySelectorAll('link')].map(link => link.href)") == ["data:,"]


@pytest.mark.timeout(300)
def test_reader_chooses_the_smoothing_and_reads_values_under_the_pointer(
    page_without_comparison: Path, browser: Browser
) -> None:
    # A machine with the browser has the driver, too.
    from selenium.webdriver.common.action_chains import ActionChains

    browser.open(page_without_comparison, width=1280, dark=False)
    shown = """return [...new Set([...document.querySelectorAll('.smoothed')].filter((layer) =>
        getComputedStyle(layer).display !== 'none').map((layer) => layer.getAttribute('class')))]"""
    assert browser.run(shown) == ["smoothed width1"]
    browser.run("document.querySelector('label[for=smoothing-5]').click()")
    assert browser.run(shown) == ["smoothed width5"]
    reading = browser.driver.find_elements("css selector", ".width5 .reading rect")[1]
    visible = """return [...document.querySelectorAll('.reading text')].filter((text) =>
        getComputedStyle(text).visibility === 'visible' && text.getBoundingClientRect().width
    ).map((text) => text.textContent)"""
    assert browser.run(visible) == []
    ActionChains(browser.driver).move_to_element(reading).perform()
    assert browser.run(visible)[0] == "iteration 1"
    assert browser.complaints() == []
