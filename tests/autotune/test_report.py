"""The files that a finished search leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest

from autotune.records import SearchResult
from autotune.report import write_outputs
from autotune.report.answer import answer
from autotune.report.page import report_html
from autotune.report.table import COLUMNS, UNTRIED
from runtime.config import load_config
from runtime.errors import UserError
from tests.autotune import factories

RESULTS: dict[str, Callable[[], SearchResult]] = {
    "two ranks": factories.search_result,
    "one rank": lambda: factories.search_result(ranks=1, own=False),
    "noisy": lambda: factories.search_result(half_width=0.08),
    "three hundred runs": lambda: _many_runs(300),
    "one trial": factories.one_trial,
    "nothing fits": factories.nothing_fits,
    "nothing measured": factories.nothing_measured,
}


class _Page(HTMLParser):
    """Checks nesting, and collects what a page links to, its ids and its text."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.extend(data.split())

    @property
    def text(self) -> str:
        return " ".join(self.words)


def _many_runs(count: int) -> SearchResult:
    result = factories.search_result(size=60)
    times = count // len(result.trials) + 1
    trials = (result.trials * times)[:count]
    numbered = tuple(replace(trial, number=number) for number, trial in enumerate(trials))
    return replace(result, trials=numbered)


@dataclass(frozen=True)
class _Written:
    result: SearchResult
    folder: Path
    files: list[Path]

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()


@pytest.fixture(params=RESULTS, scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Written:
    """The files of one result, in a folder where an earlier search has left a best.json."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "best.json").write_text("{}")
    result = RESULTS[request.param]()
    return _Written(result, folder, write_outputs(result, folder))


class TestEveryResult:
    """What holds of a report whatever the search found."""

    def test_the_page_is_sound_and_needs_no_network(self, written: _Written) -> None:
        page = _Page(written.page)
        assert len(page.ids) == len(set(page.ids))
        for reference in page.references:
            assert reference.startswith("#")
            assert reference[1:] in page.ids
        for remote in ("@import", "url(http", "<link", "<iframe"):
            assert remote not in written.page

    def test_the_same_result_gives_the_same_page(self, written: _Written) -> None:
        assert report_html(written.result) == written.page

    def test_a_row_for_each_configuration(self, written: _Written) -> None:
        result = written.result
        table = pandas.read_csv(written.folder / "trials.csv")
        assert tuple(table.columns) == COLUMNS
        tried = {trial.config for trial in result.trials}
        assert len(table) == len(tried) + len(result.untried)
        assert (table["outcome"] == UNTRIED).sum() == len(result.untried)
        assert table["runs"].sum() == len(result.trials)

    def test_best_json_is_the_winner_or_absent(self, written: _Written) -> None:
        assert all(path.is_file() for path in written.files)
        assert sorted(written.folder.iterdir()) == sorted(written.files)
        best = written.folder / "best.json"
        if written.result.best is None:
            assert not best.exists()
        else:
            assert load_config(best) == written.result.best.config


@pytest.fixture(scope="module")
def page() -> str:
    return report_html(factories.search_result())


def test_figures_stand_in_the_table() -> None:
    from autotune.report.table import trials_table

    result = factories.search_result()
    assert result.best is not None
    first = trials_table(result).iloc[0]
    assert first["name"] == "winner"
    assert first["role"] == "search+confirm"
    assert first["measured_samples_per_second"] == result.best.samples_per_second.value
    assert first["measured_samples_per_second_low"] == result.best.samples_per_second.low
    assert first["measured_tokens_per_second"] == pytest.approx(
        256 * first["measured_samples_per_second"]
    )
    assert first["measured_reserved_peak_bytes"] == max(
        run.reserved_peak_bytes or 0 for run in result.best.measurements
    )


def test_the_answer_comes_first_and_states_every_speed_up(page: str) -> None:
    text = _Page(page).text
    assert text.index("1.43× the throughput of plain") < 200
    assert "Against plain derived 1.43×" in text
    assert "Against yours derived 1.97×" in text
    assert "109.4 samples/s" in text
    assert "67% of the limit of 900 MiB; 297 MiB headroom" in text


def test_what_comes_from_outside_is_escaped() -> None:
    """Tracebacks, reasons, names, paths and notes are other people's text."""
    evil = '<script>alert("x")</script><img src=http://evil.example/x>'
    result = factories.search_result()
    result = replace(
        result,
        model_file=f"{evil}.py",
        study_name=evil,
        command=evil,
        stopped_because=evil,
        notes=(evil,),
        profile=factories.profile(block_class=evil, optimizer=evil),
        hardware=factories.hardware(device_name=evil),
        dropped_dimensions={evil: evil},
        untried=tuple(replace(item, reason=evil) for item in result.untried),
    )
    text = report_html(result)
    assert text.count("<script") == 1  # the page's own
    assert "<img" not in text
    assert "alert(1)" in text  # of the traceback, shown
    assert "http://evil.example" not in _Page(text).references


def test_a_noisy_machine_is_said_so_and_a_quiet_one_is_not(page: str) -> None:
    assert answer(factories.search_result(half_width=0.051)).noisy
    assert not answer(factories.search_result(half_width=0.049)).noisy
    assert "too noisy to decide" in report_html(factories.search_result(half_width=0.08))
    assert "too noisy to decide" not in page


def test_an_unconfirmed_winner_is_said_so(page: str) -> None:
    assert "Not confirmed." in report_html(factories.one_trial())
    assert "Not confirmed." not in page


def test_what_does_not_fit_says_what_the_smallest_needs() -> None:
    text = _Page(report_html(factories.nothing_fits())).text
    assert "Nothing fits" in text
    assert "The smallest, z3 mb1x32 bf16/bf16 ckpt=full, is predicted to need 132 MiB" in text
    assert "Raise --memory-limit to 146 MiB" in text


def test_tracebacks_and_reasons_are_shown_once_for_each_run(page: str) -> None:
    result = factories.search_result()
    crashes = [trial for trial in result.trials if trial.measurement.traceback]
    assert crashes
    assert page.count("Traceback (most recent call last)") == len(crashes)
    assert "no end after 120 s: every process was ended" in page


def test_thousands_untried_are_counted_and_capped(page: str) -> None:
    result = factories.search_result()
    many = result.untried * 30
    text = report_html(replace(result, untried=many))
    assert f"{len(many):,}" in text
    assert len(text) < 2 * len(page)


def test_long_names_do_not_widen_the_page() -> None:
    long = "/very/long" * 30 + "/model.py"
    text = report_html(replace(factories.search_result(), model_file=long, study_name="x" * 200))
    assert long in text
    assert "overflow-wrap: anywhere" in text


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the middle leaves the old file, and no temporary one."""
    write_outputs(factories.one_trial(), tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match="No space left on device; choose another with --out"):
        write_outputs(factories.one_trial(), tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"best.json", "trials.csv", "report.html"}


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(UserError, match="the output folder must be writable, but"):
        write_outputs(factories.one_trial(), path)
