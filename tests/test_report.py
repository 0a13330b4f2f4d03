"""The report in a real browser: it draws, complains of nothing, asks nothing of the network; on a phone and in the dark."""

import json
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver import Chrome

from browser import chromium, complaints, draw_all, requests, show
from draftsmith.errors import UserError
from draftsmith.events import EventLog, StepRecord
from draftsmith.history import read_run
from draftsmith.report import ReportOptions, main, render
from draftsmith.report_decoding import sample
from draftsmith.report_plots import smooth, thin
from draftsmith.report_sections import sections
from synthetic_run import ANSWER, write_evaluation, write_long_run, write_run

NASTY = '<script>alert(1)</script> & \u2028 "quotes" </script>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "split-run", total=240)
    write_evaluation(first)
    return first, write_run(folder / "lower <lr>", total=240, level=0.5, split=False)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    main(ReportOptions(runs[:1], folder / "one.html"))
    main(ReportOptions(runs, folder / "two.html"))
    return {"one": folder / "one.html", "two": folder / "two.html"}


@pytest.mark.parametrize(
    ("name", "width", "phone", "dark"),
    [
        ("one", 1280, False, False), ("one", 1280, False, True), ("one", 390, True, False), ("one", 390, True, True),
        ("two", 1280, False, False), ("two", 390, True, True),
    ],
)  # fmt: skip
def test_it_draws_without_complaint_or_request(
    browser: Chrome, pages: dict[str, Path], name: str, width: int, phone: bool, dark: bool
) -> None:
    show(browser, pages[name], width, 800, dark, phone)
    draw_all(browser, width, phone)
    figures = browser.execute_script(
        """return [...document.querySelectorAll("[data-figure]")].map((place) => ({
            key: place.dataset.figure,
            marks: place.querySelectorAll(".scatterlayer path.js-line, .barlayer path").length,
            inside: place.querySelector("svg.main-svg").getBoundingClientRect().right <= innerWidth,
            label: place.getAttribute("aria-label"),
            ink: getComputedStyle(place.querySelector(".xtick text")).fill }))"""
    )
    assert len(figures) >= 13
    for figure in figures:
        assert figure["marks"] > 0 and figure["inside"] and len(figure["label"]) > 20, figure
        assert figure["ink"] == ("rgb(170, 179, 192)" if dark else "rgb(74, 82, 96)"), figure
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 30)" if dark else "rgb(251, 251, 250)")
    assert browser.execute_script("return document.documentElement.scrollWidth") == width, "nothing hangs over the edge"
    assert browser.execute_script("return report.error") is None
    assert complaints(browser) == []
    assert requests(browser) == [pages[name].as_uri()]


def test_figures_are_drawn_as_they_come_near(browser: Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["one"], 390, 700, phone=True)
    drawn, total = browser.execute_script("return [report.drawn, report.total]")
    assert 0 < drawn < total
    modes = browser.execute_script(
        "return [...document.querySelectorAll('.js-plotly-plot')].map(p => p.layout.dragmode)"
    )
    assert set(modes) == {False}, "a finger scrolls the page and does not zoom a plot"


def test_the_theme_changes_while_the_page_is_open(browser: Chrome, pages: dict[str, Path]) -> None:
    show(browser, pages["one"], 1280, 800)
    line = "return document.querySelector('[data-figure=acceptance] .js-line').style.stroke"
    assert browser.execute_script(line) == "rgb(11, 107, 176)"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    browser.execute_async_script("setTimeout(arguments[0], 400)")
    assert browser.execute_script(line) == "rgb(90, 174, 240)"


def test_text_has_contrast(browser: Chrome, pages: dict[str, Path]) -> None:
    """WCAG AA: 4.5 to 1 for every colour of text on the backgrounds it stands on."""
    for dark in (False, True):
        show(browser, pages["one"], 1280, 800, dark)
        names = ("ink", "soft", "accent", "good", "warn", "bad", "paper", "card", "tint", "kept", "kept-2", "bonus")
        values = browser.execute_script(
            "const style = getComputedStyle(document.documentElement);"
            "return arguments[0].map((name) => style.getPropertyValue('--' + name).trim())",
            names,
        )
        colors = dict(zip(names, map(luminance, values), strict=True))
        for ink, grounds in (
            ("ink", ("paper", "card", "tint", "kept", "kept-2", "bonus")), ("soft", ("paper", "card", "tint")),
            ("accent", ("paper", "card")), ("good", ("paper",)), ("warn", ("paper",)), ("bad", ("paper", "card")),
        ):  # fmt: skip
            for ground in grounds:
                high, low = sorted((colors[ink], colors[ground]), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground, dark)


def luminance(color: str) -> float:
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_samples_show_the_text_with_its_passes(
    browser: Chrome, pages: dict[str, Path], runs: tuple[Path, Path]
) -> None:
    show(browser, pages["one"], 1280, 800)
    answers = browser.execute_script("return [...document.querySelectorAll('.sample .answer')].map(a => a.textContent)")
    assert answers == [ANSWER] * 4
    values = json.loads((runs[0] / "evaluations/evaluation_001.json").read_text())["samples"][0]
    pieces = sample(values).pieces
    assert sum(piece.kind == "bonus" for piece in pieces) == len(values["runs"])
    assert sum(piece.kind.startswith("run") for piece in pieces) == sum(n > 0 for n in values["accepted"])
    question = browser.execute_script("return document.querySelector('.sample .prompt').textContent")
    assert question == values["question"], "markup in a question is shown, not obeyed"


class Outline(HTMLParser):
    """Tags that matter for readers of the page by ear or keyboard, and addresses that would leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("h1", "h2", "h3"):
            self.headings.append(int(tag[1]))
        if values.get("id"):
            self.ids.append(values["id"] or "")
        if tag == "a":
            self.links.append(values.get("href") or "")
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("#", "data:"))]


def test_structure(pages: dict[str, Path]) -> None:
    for page in pages.values():
        outline = Outline()
        outline.feed(page.read_text())
        assert outline.headings[0] == 1 and outline.headings.count(1) == 1
        assert all(after <= before + 1 for before, after in zip(outline.headings, outline.headings[1:], strict=False))
        assert len(outline.ids) == len(set(outline.ids))
        assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)
        assert outline.outside == []


def test_a_copy_gives_the_same_page(runs: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / runs[0].name)
    assert render([read_run(runs[0], spans=True)]) == render([read_run(tmp_path / runs[0].name, spans=True)])


def test_a_run_that_just_began(browser: Chrome, tmp_path: Path) -> None:
    with EventLog(tmp_path / "young") as log:
        log.note(NASTY)
    assert main(ReportOptions((tmp_path / "young",))) == 0
    show(browser, tmp_path / "young/report.html", 800, 600)
    assert NASTY in browser.execute_script("return document.querySelector('.notes').textContent")
    assert complaints(browser) == [] and requests(browser) == [(tmp_path / "young/report.html").as_uri()]


def test_odd_records(browser: Chrome, tmp_path: Path) -> None:
    """One step, a loss that is not finite, no optional field; and a name that is markup."""
    folder = tmp_path / "<b>x"
    folder.mkdir(parents=True)
    with EventLog(folder) as log:
        log.step(StepRecord(step=1, loss=float("nan")))
        log.step(StepRecord(step=2, loss=3.0))
    main(ReportOptions((folder,), tmp_path / "odd.html"))
    show(browser, tmp_path / "odd.html", 800, 600)
    assert browser.execute_script("return document.querySelector('h1').firstChild.textContent") == "<b>x"
    draw_all(browser, 800)
    assert complaints(browser) == []


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), EventLog(tmp_path):
        raise RuntimeError("the <device> went away")
    page = render([read_run(tmp_path)])
    assert "RuntimeError: the &lt;device&gt; went away" in page and 'class="state failed"' in page


def test_runs_with_other_fields_are_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with EventLog(tmp_path / "bare") as log:
        log.step(StepRecord(step=7, loss=4.0))
    keys = [f.key for part in sections([read_run(runs[0]), read_run(tmp_path / "bare")]) for f in part.figures]
    assert "acceptance" in keys and "loss" in keys and len(keys) == len(set(keys))


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    write_long_run(tmp_path, 20_000)
    page = render([read_run(tmp_path, spans=True)])
    assert len(page) < 3_000_000
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])["figures"]
    assert max(len(line["x"]) for figure in figures.values() for line in figure["data"]) <= 1500


def test_unwritable(runs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        main(ReportOptions(runs[:1], tmp_path / "file" / "report.html"))
    with pytest.raises(UserError, match="at least one"):
        main(ReportOptions(()))


def test_thinning_keeps_means_and_ends() -> None:
    x = np.arange(1.0, 10_001)
    thinned = thin(x, np.sin(x / 500), 600)
    assert len(thinned[0]) == 600 and thinned[0][-1] == 10_000
    np.testing.assert_allclose(thinned[1], np.sin((thinned[0] - 8) / 500), atol=0.02)
    flat = smooth(np.full(1000, 3.0))
    np.testing.assert_allclose(flat, 3.0)
    line = smooth(np.arange(1000.0))
    np.testing.assert_allclose(line[20:-20], np.arange(1000.0)[20:-20])
