import base64
import csv
import io
import json
import re
import shutil
from itertools import pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from maml_rl.report import write_report
from tests.report.chromium import Browser
from tests.report.conftest import NAVIGATION, make_run

PROMP = {"algorithm": "promp", "fast-lr": 0.3}

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
PAGE_COLOR = "return getComputedStyle(document.body).backgroundColor"
SMALLEST_TEXT = """
return Math.min(...[...document.querySelectorAll('svg text')].filter((text) => text.getClientRects().length)
    .map((text) => text.getBoundingClientRect().height))
"""


# Whether an element is shown; drawings that are not displayed are visible for `checkVisibility` alone.
SEEN = "const seen = (element) => element.checkVisibility() && element.getClientRects().length > 0;"
# Luminance, contrast and the color behind an element, as WCAG 2.2 has them.
COLORS = (
    SEEN
    + """
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
const luminance = (color) => channels(color).slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
const contrast = (one, other) => {
    const [dim, bright] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dim + 0.05);
};
const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
        const color = getComputedStyle(each).backgroundColor;
        if ((channels(color)[3] ?? 1) === 1) return color;
    }
    return 'rgb(255, 255, 255)';
};
"""
)
PALE_TEXT = (
    COLORS
    + """
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const pale = [];
while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !seen(element) || element.closest('script')) continue;
    const style = getComputedStyle(element);
    const ratio = contrast(element.closest('svg') ? style.fill : style.color, behind(element));
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) pale.push([texts.currentNode.textContent, ratio]);
}
return pale;
"""
)
# Lines, dots and intervals of charts, and the signs for their colors elsewhere. A dot has a rim or an inside.
PALE_MARKS = (
    COLORS
    + """
const marks = 'path.line, path.interval, path.axis, circle.dot, .legend i, .swatch, .bar';
return [...document.querySelectorAll(marks)].filter((mark) => seen(mark)).map((mark) => {
    const style = getComputedStyle(mark);
    const inside = mark.matches('circle') ? [style.fill] : [];
    const colors = mark.closest('svg') ? [style.stroke, ...inside] : [style.color];
    const solid = style.opacity * style.strokeOpacity * style.fillOpacity === 1;
    const paper = behind(mark.parentElement);
    return [mark.getAttribute('class'), solid ? Math.max(...colors.map((color) => contrast(color, paper))) : 0];
}).filter(([, ratio]) => ratio < 3);
"""
)
# Charts in which nothing is drawn between the axes.
WITHOUT_INK = (
    SEEN
    + """
const drawn = (mark) => seen(mark)
    && (mark.tagName === 'circle' ? mark.r.baseVal.value : mark.getTotalLength()) > 0;
return [...document.querySelectorAll('figure svg')].filter((chart) =>
    ![...chart.querySelectorAll('path.line, path.band, path.interval, circle.dot')].some(drawn)
).map((chart) => chart.closest('figure').querySelector('h3').textContent);
"""
)
SHOWN_LAYERS = (
    SEEN
    + """
const labels = [...document.querySelectorAll('.by .label')].filter((label) => seen(label));
return [...new Set(labels.map((label) => label.textContent))];
"""
)
# What a button would save: the name of the file, and its content in base64.
CATCH = """
HTMLAnchorElement.prototype.click = function () { window.file = this.download; };
URL.createObjectURL = (blob) => { window.blob = blob; return 'data:,'; };
window.saved = async (card, index) => {
    window.file = null;
    card.querySelectorAll('.saving button')[index].click();
    while (window.file === null) await new Promise((next) => setTimeout(next, 10));
    const bytes = new Uint8Array(await window.blob.arrayBuffer());
    return [window.file, btoa([...bytes].map((byte) => String.fromCharCode(byte)).join(''))];
};
"""


@pytest.fixture(scope="module")
def page(navigation_runs: Path, cheetah_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report([navigation_runs, cheetah_run], folder / "report.html", tasks=4, placement={"num-workers": 0})


@pytest.fixture(scope="module")
def page_without_comparison(navigation_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        shutil.copy(navigation_runs / f"seed-{seed}" / "metrics.jsonl", folder / f"seed-{seed}.jsonl")
    return write_report([navigation_runs], folder / "report.html", tasks=4, placement={"num-workers": 0})


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
def test_page_fits_its_width_can_be_read_and_its_tables_scroll_by_keyboard(
    page_without_comparison: Path, browser: Browser
) -> None:
    for width in (360, 768, 1280):
        browser.open(page_without_comparison, width=width, dark=False)
        assert browser.run(TOO_WIDE) == [], width
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(SMALLEST_TEXT) >= 9, width
        assert browser.complaints() == [], width
        frames = browser.run(SCROLLING)
        assert frames or width > 360, "the table of returns is wider than a phone"
        for shadows, tab_index, label in frames:
            assert (shadows, tab_index) == (4, 0)
            assert label


@pytest.fixture(scope="module")
def comparison(navigation_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two experiments, of which one was evaluated once during training and has a single run."""
    folder = tmp_path_factory.mktemp("report")
    settings = {key: value for key, value in NAVIGATION.items() if key != "cg-iters"}
    other = make_run(folder / "promp", {**settings, **PROMP, "evaluate-every": 3, "evaluation-tasks": 2})
    return write_report([navigation_runs, other], folder / "report.html", tasks=4, placement={"num-workers": 0})


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about a run that was interrupted one iteration after a gap, and evaluated once."""
    folder = tmp_path_factory.mktemp("report")
    run = make_run(folder / "run", {**NAVIGATION, "evaluate-every": 2, "evaluation-tasks": 2})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("crc32")
    rows[1] |= {key: None for key in rows[1] if key.startswith(("return/", "kl", "policy/", "time/"))}
    rows[0] |= {key: None for key in rows[0] if key.startswith(("return/", "kl", "policy/", "time/"))}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((run / "config.json").read_text())
    (run / "SHA256SUMS").unlink(missing_ok=True)
    (run / "config.json").write_text(json.dumps(config | {"num-batches": 9}))
    return write_report([run], folder / "report.html", tasks=20, placement={"num-workers": 0})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["comparison", "interrupted"])
def test_every_chart_has_ink_every_table_a_caption_and_every_color_enough_contrast(
    name: str, request: pytest.FixtureRequest, browser: Browser
) -> None:
    page = request.getfixturevalue(name)
    for width, dark in product((390, 1440), (False, True)):
        browser.open(page, width=width, dark=dark)
        for axis in ("steps", "iterations", "minutes"):
            browser.run(f"document.getElementById('x-{axis}').click()")
            assert browser.run(WITHOUT_INK) == [], (width, dark, axis)
        assert (brightness(browser.run(PAGE_COLOR)) < 0.2) == dark, "the colors are those that the reader prefers"
        assert browser.run(PALE_TEXT) == [], (width, dark)
        assert browser.run(PALE_MARKS) == [], (width, dark)
    assert browser.run("return [...document.querySelectorAll('table')].filter(table => !table.caption).length") == 0
    assert browser.run("return [...document.querySelectorAll('th')].filter(cell => !cell.scope).length") == 0
    levels = browser.run("return [...document.querySelectorAll('h1,h2,h3,h4')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_first_screen_has_the_verdict_and_colors_of_experiments_mean_nothing_else(
    comparison: Path, browser: Browser
) -> None:
    browser.open(comparison, width=1440, dark=False)
    assert browser.run("return document.querySelector('.verdict').getBoundingClientRect().bottom") < 900
    text = browser.run("return document.querySelector('.verdict').innerText")
    assert "environment steps" in text
    assert "2 and 1 runs" in text or "1 and 2 runs" in text
    legends = browser.run(
        """return [...document.querySelectorAll('.legend li')].map((entry) => [
            entry.closest('section').querySelector('h2').textContent, entry.textContent,
            getComputedStyle(entry.querySelector('i')).color])"""
    )
    names = ["maml-trpo", "promp"]
    meanings: dict[str, set[str]] = {}
    for heading, text, color in legends:
        whose = next((name for name in names if name == heading or text.startswith(name)), text)
        meanings.setdefault(color, set()).add(text if text in ("start", "goal") else whose)
    assert {meaning for each in meanings.values() for meaning in each} > {*names, "goal", "random initialization"}
    assert [each for each in meanings.values() if len(each) > 1] == []


@pytest.mark.timeout(300)
def test_chart_is_saved_as_svg_png_and_csv(page_without_comparison: Path, browser: Browser) -> None:
    browser.open(page_without_comparison, width=1280, dark=False)
    browser.run("document.getElementById('x-minutes').click(); document.getElementById('smoothing-5').click()")
    browser.run(CATCH)
    cards = "[...document.querySelectorAll('figure')].filter((card) => card.querySelector('svg'))"
    kinds = browser.run(f"return {cards}.map((card) => card.querySelectorAll('.saving button').length)")
    assert set(kinds) == {3}
    saved = {}
    for index, kind in enumerate(("svg", "png", "csv")):
        file, content = browser.wait(f"saved(document.querySelectorAll('figure')[0], {index})")
        assert file == f"navigation-learning-curve.{kind}"
        saved[kind] = base64.b64decode(content)
    root = ElementTree.fromstring(saved["svg"])
    drawn = [each for each in root.iter() if each.get("stroke-width") == "2px" and each.tag.endswith("path")]
    # The mean of each inner step, of the smoothing and the axis that are shown; the seeds are thinner.
    assert len(drawn) == 2
    assert "Learning curve" in "".join(root.itertext())
    assert "minutes of training" in "".join(root.itertext())
    assert "environment steps" not in "".join(root.itertext())
    assert "var(" not in saved["svg"].decode()
    with Image.open(io.BytesIO(saved["png"])) as picture:
        assert picture.width >= 3 * 480
        assert len({color for _, color in picture.convert("RGB").getcolors(2**24) or []}) > 3
    rows = list(csv.DictReader(io.StringIO(saved["csv"].decode())))
    assert list(rows[0]) == ["series", "steps", "iterations", "minutes", "mean return", "low", "high"]
    assert [row["series"] for row in rows] == ["before adaptation"] * 3 + ["after 1 step"] * 3
    seeds = [
        [json.loads(line) for line in (page_without_comparison.parent / f"seed-{seed}.jsonl").read_text().splitlines()]
        for seed in (0, 1)
    ]
    steps, returns = ([[row[key] for row in rows] for rows in seeds] for key in ("env_steps", "return/step_1"))
    # At the steps of the seed that took the fewest.
    fewest = min(steps, key=lambda taken: taken[-1])
    means = np.mean([np.interp(fewest, *of_seed) for of_seed in zip(steps, returns, strict=True)], 0)
    assert [float(row["mean return"]) for row in rows[3:]] == pytest.approx(means, rel=1e-5)


@pytest.mark.timeout(300)
def test_page_without_scripts_shows_every_chart_and_switches_its_axis(
    page_without_comparison: Path, browser: Browser
) -> None:
    browser.run_scripts_of_pages(False)
    try:
        browser.open(page_without_comparison, width=1280, dark=False)
        assert browser.run("return document.querySelectorAll('.saving').length") == 0
        assert browser.run(WITHOUT_INK) == []
        browser.run("document.querySelector('label[for=x-minutes]').click()")
        assert browser.run(SHOWN_LAYERS) == ["minutes of training"]
    finally:
        browser.run_scripts_of_pages(True)


@pytest.mark.timeout(300)
def test_reader_chooses_axis_and_smoothing_and_reads_values_under_the_pointer(
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
    assert browser.run(SHOWN_LAYERS) == ["environment steps"]
    browser.run("document.querySelector('label[for=x-iterations]').click()")
    assert browser.run(SHOWN_LAYERS) == ["iterations"]
    texts = "return [...document.querySelectorAll('.reading text')].map((text) => text.textContent)"
    assert browser.run(texts) == []
    chart = browser.driver.find_element("css selector", "figure svg")
    ActionChains(browser.driver).move_to_element_with_offset(chart, chart.size["width"] // 2 - 20, 0).perform()
    head, *values = browser.run(texts)
    assert head == "3 iterations"
    metrics = [
        json.loads(line)["return/step_1"]
        for seed in (0, 1)
        for line in (page_without_comparison.parent / f"seed-{seed}.jsonl").read_text().splitlines()
    ]
    # The moving average over five of three iterations is the mean of all.
    label, value = values[1].split(": ")
    assert label.endswith("after 1 step")
    assert float(value.replace("\N{MINUS SIGN}", "-")) == pytest.approx(sum(metrics) / 6, rel=1e-3)
    assert browser.complaints() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_printed_page_has_no_controls_and_no_heading_at_the_end_of_a_sheet(
    page_without_comparison: Path, browser: Browser
) -> None:
    browser.open(page_without_comparison, width=1280, dark=False)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        for hidden in (".choices", ".saving", ".card:has(details)"):
            assert browser.run(f"return document.querySelector('{hidden}').offsetHeight") == 0, hidden
        columns = "return getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
        assert browser.run(columns) == 2
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    sheets = browser.driver.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})["data"]
    assert len(re.findall(rb"/Type /Page\b(?!s)", base64.b64decode(sheets))) <= 6
