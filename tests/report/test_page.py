"""The page in a real browser: its plots and controls, and that it loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browser import PATIENCE, launched
from made_up import made_up
from softmax_rnn.experiments.claims import OWN, PAPER
from softmax_rnn.report.html import Section, page
from softmax_rnn.report.table import results

expect.set_options(timeout=PATIENCE)
EVIL = "</script><script>alert(1)</script><img src=https://example.org/x onerror=alert(2)>"
NAMES = (EVIL, "a &lt; %{y} <b>b</b>")  # of variants, were they not checked before
VARIANTS = {"softmax": 1.5, "norm": 1.503, "taylor:4": 1.9}
MANY = {f"taylor:{order}": 2.0 + 0.05 * order for order in range(9)}
CLAIMS = [
    {
        "source": source,
        "claim": number,
        "text": text,
        "verdict": verdict,
        "check": f"norm equal to {EVIL}",
        "where": EVIL,
        "outcome": verdict,
        "reason": "one seed" if verdict == "undecided" else "",
        "seeds": 2,
        "found": found,
    }
    for source, number, text, verdict, found in [
        (PAPER, 1, "Norm's loss equals softmax's.", "holds", "+0.0030 [+0.0020, +0.0040]"),
        (PAPER, 2, "Gate is slightly worse.", "undecided", "+0.0030"),
        (PAPER, 7, "Detaching hurts.", "not run", ""),
        (OWN, 1, "Decays help.", "not run", ""),
    ]
]


class Fake:
    """A run's configuration with an attention that no configuration accepts."""

    def __init__(self, config: Any, attention: str) -> None:
        self._config, self.attention = config, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def to_dict(self) -> dict[str, Any]:
        return {**self._config.to_dict(), "attention": self.attention}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of a few variants, one of many, two of them hostile, and two seeds of one."""
    root = tmp_path_factory.mktemp("page") / "a b#c"
    three = [
        made_up(root / "base-web", name, seed, loss + 0.01 * seed, corpus=EVIL)
        for name, loss in VARIANTS.items()
        for seed in (0, 1, 2)
    ]
    one = [made_up(root / "long-web", name, 0, loss) for name, loss in MANY.items()]
    two = [made_up(root / "large-web", "norm", seed, 1.5 + 0.01 * seed) for seed in (0, 1)]
    titles = {EVIL: three, "long": one, "large": two}
    sections = [Section(title, runs, results(runs)) for title, runs in titles.items()]
    for run, name in zip(one[-2:], NAMES, strict=True):
        run.__dict__["config"] = Fake(run.config, name)
    path = root / "figure" / "report.html"
    path.parent.mkdir()
    path.write_text(page(sections, path.parent, f"Two sections {EVIL}", CLAIMS), encoding="utf-8")
    return path


@pytest.fixture
def opened(chromium: Browser, written: Path) -> Iterator[Page]:
    yield from _opened(chromium, written)


@pytest.fixture
def short(chromium: Browser, tmp_path: Path) -> Iterator[Page]:
    """A page of runs with three evaluations, and of runs with one."""
    sections = []
    for every in (70, 200):
        runs = [
            made_up(tmp_path / str(every), name, seed, loss, every=every)
            for name, loss in VARIANTS.items()
            for seed in (0, 1, 2)
        ]
        sections.append(Section(f"every {every}", runs, results(runs)))
    path = tmp_path / "report.html"
    path.write_text(page(sections, tmp_path), encoding="utf-8")
    yield from _opened(chromium, path)


def _opened(chromium: Browser, written: Path) -> Iterator[Page]:
    """The page, loaded without a network; at the end it must have gone without a complaint."""
    context = chromium.new_context(offline=True, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    shown = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("dialog", lambda dialog: complaints.append(dialog.message))
    shown.on("request", lambda request: requests.append(request.url))
    shown.goto(written.as_uri())
    expect(shown.locator(".scatterlayer")).to_have_count(shown.locator(".plot").count())
    yield shown
    context.close()
    assert complaints == []
    assert requests == [written.as_uri()]


def expect_lines(shown: Page, count: int, split: str, place: int = 0) -> None:
    """So many curves in a plot; a band is a trace without a line."""
    plot = shown.locator(".place").nth(place).locator(f".plot[data-split={split}]")
    expect(plot.locator(".scatterlayer .trace path.js-line")).to_have_count(count)


def ticks(shown: Page) -> list[str]:
    return shown.locator(".plot[data-split=test]").first.locator(".ytick").all_inner_texts()


def expect_axis(shown: Page, kind: str) -> None:
    shown.wait_for_function(
        "kind => document.querySelector('.plot')._fullLayout.yaxis.type === kind", arg=kind
    )


def test_every_curve_is_drawn_and_none_can_be_sent_away(opened: Page) -> None:
    for split in ("test", "train"):
        for place, count in enumerate((3, 9, 3)):  # of two seeds their mean, and each
            expect_lines(opened, count, split, place)
        plots = opened.locator(f".plot[data-split={split}]")
        bands = [plots.nth(i).locator(".trace path.js-fill").count() for i in range(3)]
        assert bands == [3, 0, 0]
    captions = opened.locator("figcaption").all_inner_texts()
    for caption, words in zip(captions, ("Bands are 95%", "One seed", "Thin lines"), strict=True):
        assert words in caption
    buttons = opened.locator(".plot").first.locator("[data-title]")
    titles = buttons.evaluate_all("all => all.map(button => button.dataset.title)")
    assert titles[0].startswith("Download plot")
    assert "Share chart..." not in titles  # which would upload it


def test_a_variant_goes_and_comes_by_mouse_and_by_keyboard(opened: Page) -> None:
    box = opened.get_by_role("checkbox", name="norm").first
    opened.locator("label", has_text="norm").first.click()
    for count, split, place in ((2, "test", 0), (2, "train", 0), (9, "test", 1)):
        expect_lines(opened, count, split, place)
    expect(box).not_to_be_checked()
    box.focus()
    opened.keyboard.press("Space")
    expect_lines(opened, 3, "test")
    opened.keyboard.press("Space")
    expect_lines(opened, 2, "test")
    for name, left in (("Hide all", 0), ("Show all", 3)):
        opened.get_by_role("button", name=name).first.focus()
        opened.keyboard.press("Enter")
        expect_lines(opened, left, "test")


def test_the_loss_axis_switches(opened: Page) -> None:
    expect_axis(opened, "log")
    before = ticks(opened)
    opened.get_by_label("linear").first.check()
    expect_axis(opened, "linear")
    opened.get_by_label("linear").first.press("ArrowLeft")
    expect_axis(opened, "log")
    assert ticks(opened) == before


def test_smoothing_changes_the_train_curves_alone(opened: Page) -> None:
    def path(split: str) -> str | None:
        plot = opened.locator(f".plot[data-split={split}]").first
        return plot.locator("path.js-line").first.get_attribute("d")

    before = {split: path(split) for split in ("test", "train")}
    choice = opened.get_by_label("Train loss: mean over").first
    assert choice.locator("option").all_inner_texts() == ["10 steps", "20 steps"]
    choice.focus()
    opened.keyboard.press("ArrowDown")
    opened.wait_for_function("document.querySelectorAll('.plot')[1].data[1].x.length === 10")
    assert path("train") != before["train"]
    assert path("test") == before["test"]
    means = opened.evaluate("document.querySelectorAll('.plot')[1].data[1].y")
    first = [1.51 + 5 / step for step in (10, 20, 30, 40)]
    assert means[:2] == pytest.approx([sum(first[:2]) / 2, sum(first[2:]) / 2], abs=1e-5)


def test_values_are_shown_to_the_mouse_and_to_the_arrow_keys(opened: Page) -> None:
    plot = opened.locator(".plot[data-split=test]").nth(0)
    plot.scroll_into_view_if_needed()
    plot.hover()
    hover = plot.locator(".hoverlayer")
    expect(hover).to_contain_text("taylor:4")
    opened.mouse.move(0, 0)
    plot.focus()
    opened.keyboard.press("ArrowRight")
    # The mean of three seeds, and the 95% interval of three values that are 0.01 apart.
    expect(hover).to_contain_text("1.6300 [1.6052, 1.6548]")
    opened.keyboard.press("ArrowRight")
    expect(hover).to_contain_text("1.5700 [")
    two = opened.locator(".place").nth(2).locator(".plot").first
    two.focus()
    opened.keyboard.press("ArrowRight")
    expect(two.locator(".hoverlayer .hovertext, .hoverlayer .legend")).to_have_count(1)
    expect(two.locator(".hoverlayer")).to_contain_text("1.6250")


def test_hostile_words_are_words(opened: Page) -> None:
    expect(opened.locator("h1")).to_have_text(f"Two sections {EVIL}")
    expect(opened.locator(".place h2").first).to_have_text(EVIL)
    expect(opened.locator(".checks tbody th").first).to_have_text(f"1. norm equal to {EVIL}")
    assert f"corpus: {EVIL}" in (opened.locator("pre").first.text_content() or "")
    assert opened.locator("img").count() == 0
    place = opened.locator(".place").nth(1)
    assert f"attention: {EVIL}" in (place.locator("pre").nth(14).text_content() or "")
    for name in NAMES:
        expect(place.locator("label", has_text=name)).to_be_visible()
    hover = place.locator(".hoverlayer").first
    place.locator(".plot").first.focus()
    opened.keyboard.press("ArrowRight")
    for _ in MANY:  # up to the last curve, one at a time
        opened.keyboard.press("ArrowDown")
    expect(hover).to_contain_text(NAMES[1])
    opened.keyboard.press("ArrowUp")
    expect(hover).to_contain_text(EVIL)
    place.get_by_role("checkbox", name="taylor:0").uncheck()
    place.locator(".plot").first.focus()
    opened.keyboard.press("ArrowRight")  # few enough for one box
    expect(hover).to_contain_text(EVIL[:27])
    expect(hover).to_contain_text(NAMES[1])


def test_claims_come_first_and_links_lead_to_the_runs(opened: Page, written: Path) -> None:
    captions = opened.locator("caption").all_inner_texts()
    assert [words.split(",")[0] for words in captions[:2]] == [
        "The paper's claims",
        "Differences of test loss",
    ]
    assert captions[2].startswith("Results")
    rows = opened.locator(".checks tbody tr").all_inner_texts()
    assert "+0.0030 [+0.0020, +0.0040]" in rows[0]
    assert "\tundecided: one seed\t+0.0030\t" in rows[1]
    shown = opened.locator("section").first.inner_text()
    assert "The paper's claims without finished runs on this page: 7." in shown
    assert OWN not in shown  # no claim of this kind has runs here
    links = opened.eval_on_selector_all("details a", "all => all.map(a => a.href)")
    assert len(links) == 9 + len(MANY) + 2
    base = (written.parent.parent / "base-web").as_uri()
    assert links[0] == f"{base}/softmax-0/config.yaml"
    assert links[6] == f"{base}/taylor%3A4-0/config.yaml"


def test_a_phone_never_scrolls_sideways(opened: Page) -> None:
    opened.set_viewport_size({"width": 360, "height": 740})
    expect(opened.locator(".main-svg").first).to_have_attribute("width", "328")
    for details in opened.locator("details").all():
        details.evaluate("element => element.open = true")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360


def test_names_do_not_break_on_a_phone(chromium: Browser, tmp_path: Path) -> None:
    runs = [made_up(tmp_path, name, 0, 1.5) for name in ("softmax", "linear_cosine")]
    path = tmp_path / "report.html"
    path.write_text(page([Section("one", runs, results(runs))], tmp_path), encoding="utf-8")
    for opened in _opened(chromium, path):
        opened.set_viewport_size({"width": 390, "height": 900})
        lines = opened.locator(".results tbody th").evaluate_all(
            "all => all.map(e => { const range = document.createRange(); "
            "range.selectNodeContents(e); return range.getClientRects().length; })"
        )
        assert lines == [1, 1]


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_scroll_in_their_boxes_and_keep_the_names_in_view(opened: Page, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    for details in opened.locator("details").all():
        details.evaluate("element => element.open = true")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    scrolled = 0
    for box in opened.locator(".wide").all():
        left, inner, outer = box.evaluate("e => [e.offsetLeft, e.scrollWidth, e.clientWidth]")
        assert left + outer <= width
        scrolled += inner > outer
        box.evaluate("element => element.scrollLeft = element.scrollWidth")
        for row in (box.locator("thead tr"), box.locator("tbody tr").last):
            first, last = (row.locator("th, td").nth(n).bounding_box() for n in (0, -1))
            assert first is not None
            assert last is not None
            assert first["x"] == pytest.approx(left, abs=1)
            assert last["x"] + last["width"] <= left + outer + 1
            # Nothing shows through the name, and it is above what passes below it.
            top = row.locator("th").first.evaluate(
                "e => { const box = e.getBoundingClientRect(); e.scrollIntoView({block: 'center'});"
                " const at = e.getBoundingClientRect();"
                " return [getComputedStyle(e).backgroundColor, e.contains("
                "document.elementFromPoint(at.right - 2, (at.top + at.bottom) / 2))]; }"
            )
            assert top == ["rgb(255, 255, 255)", True]
    assert scrolled >= (5 if width == 390 else 0)  # what fits on a laptop depends on its fonts


def test_short_runs_have_lines(short: Page) -> None:
    """Three evaluations are joined; a single one has a line across the plot at its height."""
    for place, lines in ((0, 3), (1, 6)):
        expect_lines(short, lines, "test", place)
        plot = short.locator(".place").nth(place).locator(".plot[data-split=test]")
        drawn = plot.locator("path.js-line").evaluate_all("all => all.map(e => e.getBBox().width)")
        room = plot.evaluate("element => element._fullLayout.xaxis._length")
        assert sum(width > room / 2 for width in drawn) == 3
    captions = short.locator("figcaption").all_inner_texts()
    told = ["A horizontal line is the value of a single evaluation." in words for words in captions]
    assert told == [False, True]
