"""Takes the screenshots of a report that the documentation shows, in headless Chromium.

    maml-rl train finn2017/2d-navigation --num-batches 30 --meta-batch-size 20 --num-workers 1 --profile
    maml-rl test runs/finn2017/2d-navigation --fast-batch-size 40
    maml-rl report runs/finn2017/2d-navigation
    python -m scripts.picture_report runs/finn2017/2d-navigation/report.html docs/images

It writes report.png (desktop, light colors) and report-phone.png (phone, dark colors). With --every-size it writes
NAME-WIDTH-light.png and NAME-WIDTH-dark.png for a phone, a tablet and a desktop instead, to be looked at after a
change. The page may be one of the documentation, too.
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
    parser.add_argument("report", type=Path, help="report.html of a run, or another page")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--every-size", action="store_true", help="at 390, 820 and 1440 pixels, light and dark")
    options = parser.parse_args(arguments)
    pictures = [("report.png", 1100, False), ("report-phone.png", 400, True)]
    if options.every_size:
        pictures = [
            (f"{options.report.stem}-{width}-{'dark' if dark else 'light'}.png", width, dark)
            for width in (390, 820, 1440)
            for dark in (False, True)
        ]
    options.folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, width, dark in pictures:
            browser.open(options.report, width=width, dark=dark)
            # The documentation remembers the colors in which it was first shown.
            browser.run("localStorage.clear(); location.reload()")
            browser.wait(SHOW_VIDEOS)
            browser.picture(options.folder / name)
            # A palette makes a file of a quarter of the size; rare colors, such as that of the goals, stay the same.
            with Image.open(options.folder / name) as picture:
                small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
            small.save(options.folder / name, optimize=True)


if __name__ == "__main__":
    main()
