"""What a finished search says at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.records import SearchResult
from autotune.summary import summary_json, summary_lines
from tests.autotune import factories

FILES = [Path("studies/gpt/best.json"), Path("studies/gpt/report.html")]
RESULTS = {
    "found": factories.search_result(),
    "one rank": factories.search_result(ranks=1, own=False),
    "one trial": factories.one_trial(),
    "nothing fits": factories.nothing_fits(),
    "nothing measured": factories.nothing_measured(),
}


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> SearchResult:
    return RESULTS[request.param]


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_lines_keep_to_the_terminal(result: SearchResult, width: int) -> None:
    for line in summary_lines(result, FILES, width)[1:]:
        longest_word = max(map(len, line.split()))
        assert len(line) <= max(width, 30, 11 + longest_word)


def test_the_answer_is_the_first_line_and_the_next_command_the_last(result: SearchResult) -> None:
    lines = summary_lines(result, FILES, 200)
    assert not lines[0].startswith(" ")
    if result.best is None:
        assert lines[-1].split() == ["see", "studies/gpt/report.html"]
    else:
        command = "autotune measure studies/gpt/model.py --config studies/gpt/best.json"
        assert lines[-1].split() == ["next", *command.split()]


def test_json_has_the_same_keys_whatever_was_found(result: SearchResult) -> None:
    found = json.loads(json.dumps(summary_json(result, FILES)))
    assert set(found) == set(summary_json(RESULTS["found"], FILES))
    assert (found["best"] is None) == (result.best is None)
    documented = summary_json.__doc__ or ""
    assert all(f"`{key}`" in documented for key in found)


def test_a_model_in_the_working_folder_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = replace(RESULTS["found"], model_file=str(tmp_path / "my model.py"))
    assert summary_lines(here, FILES, 200)[-1].endswith(
        "autotune measure 'my model.py' --config studies/gpt/best.json"
    )
