"""Takes the screenshots of a report that the documentation shows, in headless Chromium.

    python -m scripts.picture_report runs/finn2017/2d-navigation/report.html docs/images

It writes report.png (desktop, light colors) and report-phone.png (phone, dark colors).
"""

import argparse
from pathlib import Path

from PIL import Image

from tests.report.chromium import chromium

# Videos are paused in the middle of a run and shown without their controls, which fade.
SHOW_VIDEOS = """
Promise.all([...document.querySelectorAll('video')].map((video) => new Promise((shown) => {
    video.pause();
    video.controls = false;
    video.addEventListener('seeked', shown);
    video.currentTime = 0.3 * video.duration;
})))
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.html of a run")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    options = parser.parse_args(arguments)
    with chromium() as browser:
        for name, width, dark in (("report.png", 1100, False), ("report-phone.png", 400, True)):
            browser.open(options.report, width=width, dark=dark)
            browser.wait(SHOW_VIDEOS)
            browser.picture(options.folder / name)
            # A palette makes a file of a quarter of the size; rare colors, such as that of the goals, stay the same.
            with Image.open(options.folder / name) as picture:
                small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
            small.save(options.folder / name, optimize=True)


if __name__ == "__main__":
    main()
