"""The command line: what it loads, what it prints, how it fails."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import searching
from autotune.cli import run
from autotune.observer import Observer
from autotune.records import SearchResult
from autotune.search import SearchOptions
from runtime.config import TrainConfig, save_config
from runtime.errors import ModelFileError, RunError
from tests.autotune import factories
from tests.autotune.programs import ROOT, python

MODEL = "def build_model():\n    ...\n\n\ndef make_batch(micro_batch_size):\n    ...\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file, beside which the test works."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def search_stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[SearchOptions]]:
    """Replace the search by one that returns, or raises, what is given."""

    def install(outcome: SearchResult | BaseException) -> list[SearchOptions]:
        received: list[SearchOptions] = []

        def search(options: SearchOptions, observer: Observer) -> SearchResult:
            received.append(options)
            observer.on_phase("searching")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(searching, "search", search)
        return received

    return install


class TestSearch:
    """From options to output."""

    def test_hands_every_option_over(
        self, model: Path, search_stub: Callable[..., list[SearchOptions]]
    ) -> None:
        own = factories.config(4)
        save_config(own, Path("mine.json"))
        received = search_stub(factories.search_result())
        arguments = shlex.split(
            "search model.py --ranks 2 --threads-per-rank 1 --memory-limit 900MiB "
            "--global-batch-size 64 --max-trials 7 --time-budget 2m30s --objective memory "
            "--fix precision=bf16 --fix zero_stage=3 --vary micro_batch_size=1,2 "
            "--baseline mine.json --sampler random --seed 5 --storage sqlite:///all.db --out there"
        )
        assert run(arguments) == 0
        assert received == [
            SearchOptions(
                model_file=Path("model.py"),
                ranks=2,
                threads_per_rank=1,
                memory_limit_bytes=900 * 2**20,
                global_batch_size=64,
                fix={"precision": "bf16", "zero_stage": "3"},
                vary={"micro_batch_size": ["1", "2"]},
                max_trials=7,
                time_budget_seconds=150.0,
                objective="memory",
                seed=5,
                storage="sqlite:///all.db",
                out=Path("there"),
                own=own,
                sampler="random",
                command="autotune " + " ".join(arguments),
            )
        ]

    def test_leaves_defaults_to_the_search(
        self, model: Path, search_stub: Callable[..., list[SearchOptions]]
    ) -> None:
        received = search_stub(factories.search_result())
        assert run(["search", "model.py"]) == 0
        expected = SearchOptions(model_file=Path("model.py"), command="autotune search model.py")
        assert received == [expected]

    def test_a_share_is_of_all_memory_over_the_ranks(
        self,
        model: Path,
        search_stub: Callable[..., list[SearchOptions]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(searching, "total_memory_bytes", lambda: 8 * 2**30)
        monkeypatch.setattr(searching, "measure_hardware", factories.hardware)
        received = search_stub(factories.search_result())
        assert run(["search", "model.py", "--ranks", "4", "--memory-limit", "50%"]) == 0
        assert received[0].memory_limit_bytes == 2**30

    def test_writes_the_files_and_says_the_answer_first(
        self,
        model: Path,
        search_stub: Callable[..., list[SearchOptions]],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        search_stub(factories.search_result())
        assert run(["search", "model.py", "--out", "there"]) == 0
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        assert lines[0] == "1.43× the throughput of plain"
        assert max(map(len, lines)) <= 80
        assert "109.4 samples/s (107.1 to 111.7, 3 runs)" in captured.out
        assert "603 MiB of 900 MiB a rank (67%)" in captured.out
        assert "autotune measure studies/gpt/model.py --config there/best.json" in captured.out
        assert captured.err.splitlines() == ["searching", "writing the report"]
        written = {path.name for path in Path("there").iterdir()}
        assert written == {"best.json", "trials.csv", "report.html"}

    def test_json_is_one_object_on_stdout(
        self,
        model: Path,
        search_stub: Callable[..., list[SearchOptions]],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        result = factories.search_result()
        search_stub(result)
        assert run(["search", "model.py", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert result.best is not None
        assert TrainConfig.model_validate(found["best"]["config"]) == result.best.config
        assert found["best"]["samples_per_second"]["low"] == result.best.samples_per_second.low
        assert found["speedup_over_plain"]["value"] == pytest.approx(1.43, abs=0.005)
        assert sum(found["outcomes"].values()) == len(result.trials)
        assert all(Path(name).is_file() for name in found["files"])

    @pytest.mark.parametrize("result", [factories.nothing_fits(), factories.nothing_measured()])
    def test_finding_nothing_is_a_failure(
        self,
        result: SearchResult,
        model: Path,
        search_stub: Callable[..., list[SearchOptions]],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        search_stub(result)
        assert run(["search", "model.py", "--out", "there"]) == 1
        assert "to do" in capsys.readouterr().out
        assert not Path("there/best.json").exists()


BAD_USE = {
    "no such command": (["serach"], "No such command"),
    "no model": (["search"], "Missing argument 'MODEL'"),
    "unknown option": (["search", "model.py", "--rank", "2"], "No such option"),
    "no ranks": (["search", "model.py", "--ranks", "0"], "0 is not in the range x>=1"),
    "memory": (["search", "model.py", "--memory-limit", "lots"], "2GiB, 512MiB or 1.5GB, but got"),
    "share": (["search", "model.py", "--memory-limit", "120%"], "up to 100%, but got '120%'"),
    "time": (["search", "model.py", "--time-budget", "soon"], "90s, 3m or 1h, but got 'soon'"),
    "objective": (["search", "model.py", "--objective", "cost"], "'throughput', 'memory'"),
    "no value": (["search", "model.py", "--fix", "zero_stage"], "must be DIM=VALUE"),
    "twice": (
        ["search", "model.py", "--fix", "zero_stage=1", "--fix", "zero_stage=2"],
        "--fix must name each dimension once, but got zero_stage twice (1, 2)",
    ),
    "sampler": (["search", "model.py", "--sampler", "guess"], "--sampler must be one of"),
    "no baseline": (["search", "model.py", "--baseline", "a.json"], "cannot read a.json"),
    "no model file": (["search", "missing.py"], "missing.py does not exist"),
    "no study": (["report", "nowhere"], "nowhere"),
    "url without a folder": (["report", "sqlite:///a.db"], "needs --out FOLDER"),
    "no config": (["measure", "model.py", "--config", "a.json"], "cannot read a.json"),
}


class TestErrors:
    """One or two lines on standard error, and an exit code."""

    @pytest.mark.parametrize("name", BAD_USE)
    def test_wrong_use_exits_with_2_and_says_the_rule(
        self, name: str, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments, message = BAD_USE[name]
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
        assert captured.err.startswith("autotune: ")
        assert len(captured.err.splitlines()) <= 2
        assert not Path("studies").exists()

    def test_a_typing_error_in_a_configuration_names_the_key(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("mine.json").write_text('{"zero_stag": 1}')
        assert run(["search", "model.py", "--baseline", "mine.json"]) == 2
        assert "mine.json: unknown key 'zero_stag'; the keys are ranks" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("error", "code", "text"),
        [
            (ModelFileError("model.py:3: build_model() raised ValueError: no", "detail!"), 2,
             "model.py:3: build_model() raised ValueError: no"),
            (RunError("the fork server did not start"), 1, "the fork server did not start"),
            (ZeroDivisionError("division by zero"), 1,
             "ZeroDivisionError: division by zero (a fault of this program: run with --debug"),
        ],
    )  # fmt: skip
    def test_each_kind_has_its_code(
        self,
        error: Exception,
        code: int,
        text: str,
        model: Path,
        search_stub: Callable[..., list[SearchOptions]],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        search_stub(error)
        assert run(["search", "model.py"]) == code
        captured = capsys.readouterr().err
        assert f"autotune: {text}" in captured
        assert "Traceback" not in captured
        assert "detail!" not in captured

    def test_debug_shows_the_traceback(
        self,
        model: Path,
        search_stub: Callable[..., list[SearchOptions]],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        search_stub(ZeroDivisionError("division by zero"))
        assert run(["search", "model.py", "--debug"]) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err
        search_stub(ModelFileError("model.py:3: raised", "the user's own traceback"))
        assert run(["search", "model.py", "--debug"]) == 2
        assert "the user's own traceback" in capsys.readouterr().err

    def test_an_interruption_before_anything_was_measured(
        self, model: Path, search_stub: Callable[..., list[SearchOptions]]
    ) -> None:
        search_stub(KeyboardInterrupt())
        assert run(["search", "model.py"]) == 130

    @pytest.mark.parametrize(("signal_name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
    def test_an_interrupted_search_writes_and_exits(
        self, signal_name: str, code: int, tmp_path: Path
    ) -> None:
        """The search returns what there is; the command writes it, and says how it was ended."""
        (tmp_path / "model.py").write_text(MODEL)
        script = tmp_path / "interrupted.py"
        script.write_text(
            "import sys, os, signal, time\n"
            "from autotune import searching\n"
            "from autotune.cli import run\n"
            "from tests.autotune.factories import search_result\n"
            "def search(options, observer):\n"
            "    try:\n"
            f"        os.kill(os.getpid(), signal.{signal_name}); time.sleep(60)\n"
            "    except KeyboardInterrupt:\n"
            "        return search_result()\n"
            "searching.search = search\n"
            "sys.exit(run(['search', 'model.py', '--out', 'there']))\n"
        )
        result = python(str(script), cwd=tmp_path)
        assert result.returncode == code, result.stderr
        assert "the throughput of plain" in result.stdout
        assert (tmp_path / "there" / "report.html").is_file()


class TestOtherCommands:
    """report and schema."""

    def test_schema_is_that_of_a_configuration(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["schema"]) == 0
        schema = json.loads(capsys.readouterr().out)
        assert schema["title"] == "TrainConfig"
        assert set(schema["properties"]) == set(TrainConfig.model_fields)

    def test_report_draws_again(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = factories.search_result()
        asked: list[object] = []

        def load_result(place: object) -> SearchResult:
            asked.append(place)
            return result

        monkeypatch.setattr("autotune.study.load_result", load_result)
        assert run(["report", "there"]) == 0
        assert run(["report", "sqlite:///all.db", "--out", "here"]) == 0
        assert asked == [Path("there"), "sqlite:///all.db"]
        assert Path("there/report.html").read_bytes() == Path("here/report.html").read_bytes()
        assert "wrote    there/ best.json, trials.csv, report.html" in capsys.readouterr().out

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "autotune", "schema"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
