"""Takes the pictures of the documentation from a run directory, with headless Chromium and selenium.

    python docs/pictures/take.py RUN

report.png: the page on a wide window; report-phone.png: on a phone, in the dark; watch.png: the live view.
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import rich.console
from rich.terminal_theme import TerminalTheme

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tests"), str(HERE.parent.parent / "src")]

from selenium.webdriver import Chrome  # noqa: E402

from browser import chromium, draw_all, show  # noqa: E402
from draftsmith.history import read_run  # noqa: E402
from draftsmith.report import write_report  # noqa: E402
from draftsmith.watch import view  # noqa: E402

BLACK, WHITE, COLORS = (20, 24, 30), (230, 233, 238), "282e38 ff8f86 4ccaa2 e5b04c 6db6f2 dd92cf 86ceee e6e9ee"
THEME = TerminalTheme(BLACK, WHITE, [tuple(bytes.fromhex(color)) for color in COLORS.split()])


def main() -> None:
    run = read_run(Path(sys.argv[1]), spans=True)
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as browser:
        page = Path(folder) / "report.html"
        write_report([run], page)
        show(browser, page, 1180, 900)
        draw_all(browser, 1180)
        take(browser, HERE / "report.png", 1180, 1560)
        show(browser, page, 390, 844, dark=True, phone=True)
        draw_all(browser, 390, phone=True)
        take(browser, HERE / "report-phone.png", 390, 1560)
        output = rich.console.Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
        output.print(view([run], max(session.last for session in run.sessions)))
        svg = output.export_svg(title=f"draftsmith watch {run.name}", theme=THEME, font_aspect_ratio=0.602)
        page.write_text(f"<body style='margin:0;background:#14181e'><script>report={{drawn:0,total:0}}</script>{svg}")
        show(browser, page, 1180, 900)
        height = browser.execute_script("return document.querySelector('svg').getBoundingClientRect().height")
        take(browser, HERE / "watch.png", 1180, round(height))


def take(browser: Chrome, file: Path, width: int, height: int) -> None:
    """The upper part of the page as it is drawn now."""
    browser.execute_async_script("setTimeout(arguments[0], 500)")  # plots move into place
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True}
    )
    file.write_bytes(base64.b64decode(shot["data"]))
    print(file)


if __name__ == "__main__":
    main()
