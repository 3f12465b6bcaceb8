from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import RunError
from runtime.launch import GroupEnd, Launcher, RankEvent, RankGroup
from runtime.measurement import Outcome

JOBS = "tests.runtime.launch_jobs"
OK = GroupEnd(Outcome.OK)


def start(launcher: Launcher, job: str, ranks: int = 1, **payload: Any) -> RankGroup:
    return launcher.start(
        f"{JOBS}:{job}",
        payload,
        ranks=ranks,
        threads_per_rank=1,
        memory_limit_bytes=None,
        deadline_seconds=60,
    )


def test_ranks_get_the_payload_and_report(launcher: Launcher) -> None:
    with start(launcher, "echo", ranks=2, text='ü"\n', number=1.5) as group:
        events = sorted(group.events(), key=lambda event: event.rank)
    assert group.end == OK
    assert [(event.rank, event.name) for event in events] == [(0, "echo"), (1, "echo")]
    for rank, event in enumerate(events):
        data = event.data
        assert data["payload"] == {"text": 'ü"\n', "number": 1.5}
        assert (data["rank"], data["ranks"], data["initialised"]) == (rank, 2, True)
        assert data["environment"]["WORLD_SIZE"] == "2"
        assert data["environment"]["RANK"] == str(rank)
        assert data["session"] == data["pid"]
    assert events[0].data["numpy_seed"] != events[1].data["numpy_seed"]


def test_a_rank_has_the_callers_folder_environment_and_path_and_no_input(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_VARIABLE", "of this test")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with start(launcher, "echo") as group:
        (event,) = group.events()
    assert event.data["folder"] == str(tmp_path)
    assert event.data["environment"]["A_VARIABLE"] == "of this test"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in event.data["environment"]
    assert str(tmp_path / "modules") in event.data["path"]
    assert event.data["input"] == ""


def test_one_rank_has_no_process_group(launcher: Launcher) -> None:
    with start(launcher, "echo") as group:
        (event,) = group.events()
    assert event.data["initialised"] is False


def test_a_rank_holds_none_of_the_servers_descriptors(launcher: Launcher) -> None:
    with start(launcher, "sleep"), start(launcher, "echo") as group:
        (event,) = group.events()
    # 0, 1, 2, the pipe that reports, and the listing of /proc/self/fd itself
    assert len(event.data["descriptors"]) == 5


def test_ranks_reduce_over_their_group(launcher: Launcher) -> None:
    with start(launcher, "total", ranks=3) as group:
        assert [event.data["value"] for event in group.events()] == [6.0] * 3
    assert group.end == OK


def test_two_groups_run_at_once_and_do_not_mix(launcher: Launcher) -> None:
    with start(launcher, "steps", count=50) as one, start(launcher, "total", ranks=2) as two:
        assert [event.data["value"] for event in two.events()] == [3.0, 3.0]
        assert [event.data["index"] for event in one.events()] == list(range(50))
    assert one.end == two.end == OK


def test_events_keep_their_order_and_arrive_whole(launcher: Launcher) -> None:
    with start(launcher, "steps", count=40, size=1 << 20) as group:
        events = list(group.events())
    assert [event.data["index"] for event in events] == list(range(40))
    assert all(len(event.data["text"]) == 1 << 20 for event in events)


def test_leaving_the_group_ends_its_processes(launcher: Launcher) -> None:
    with start(launcher, "train_forever", ranks=2) as group:
        events = group.events()
        pids = [next(events).data["pid"] for _ in range(2)]
        assert group.end is None
    assert group.end == OK
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    group.stop()
    assert list(group.events()) == []


def test_stopping_before_the_first_event(launcher: Launcher) -> None:
    group = start(launcher, "sleep", ranks=2)
    group.stop()
    assert group.end == OK


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rank_computes_with_the_threads_it_was_given(launcher: Launcher, threads: int) -> None:
    with launcher.start(
        f"{JOBS}:threads",
        {},
        ranks=1,
        threads_per_rank=threads,
        memory_limit_bytes=None,
        deadline_seconds=60,
    ) as group:
        assert [event.data for event in group.events()] == [{"set": threads, "busy": threads}]


def test_a_start_costs_a_fork_and_not_the_imports(launcher: Launcher) -> None:
    with start(launcher, "cost", ranks=2) as group:
        events = list(group.events())
    assert len(events) == 2
    for event in events:
        assert event.data["parent"] == launcher.server_pid
        assert event.data["seconds"] < 0.5  # of processor time; the imports alone take 2


def test_a_payload_that_is_not_json_is_refused_and_leaves_no_group(launcher: Launcher) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        start(launcher, "echo", wrong=object())
    with start(launcher, "total", ranks=2) as group:
        assert len(list(group.events())) == 2


def test_data_loader_workers_serve_and_end(launcher: Launcher) -> None:
    with start(launcher, "load_data", ranks=2) as group:
        events = group.events()
        first = [next(events).data for _ in range(2)]
    workers = [pid for data in first for pid in data["workers"]]
    assert [data["total"] for data in first] == [6.0, 6.0]
    assert len(workers) == 4
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


@pytest.mark.parametrize(
    "wrong", [{"ranks": 0}, {"threads_per_rank": 0}, {"deadline_seconds": 0.0}]
)
def test_impossible_numbers_are_refused(launcher: Launcher, wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"ranks": 1, "threads_per_rank": 1, "deadline_seconds": 1.0}
    with pytest.raises(ValueError, match="must hold, but got"):
        launcher.start(f"{JOBS}:echo", {}, memory_limit_bytes=None, **{**good, **wrong})


def test_a_closed_launcher_says_so_and_has_ended_its_groups() -> None:
    launcher = Launcher()
    group = start(launcher, "sleep", ranks=2)
    next(group.events())
    launcher.close()
    launcher.close()
    assert group.end == OK
    with pytest.raises(RunError, match="closed"):
        start(launcher, "echo")


def test_fresh_processes_where_forking_is_out_of_the_question() -> None:
    with Launcher(fork=False) as launcher:
        with start(launcher, "echo", ranks=2, a=1) as group:
            events = list(group.events())
        assert group.end == OK
        assert [event.data["payload"] for event in events] == [{"a": 1}] * 2
        assert all(event.data["session"] == event.data["pid"] for event in events)
        with start(launcher, "end", ranks=2, how="segfault", rank=1) as group:
            list(group.events())
        assert group.end is not None
        assert group.end.failed_rank == 1
        assert "SIGSEGV" in group.end.reason


def test_it_works_beside_modules_with_the_names_of_ours(tmp_path: Path) -> None:
    for name in ("runtime", "torch", "json"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the stray {name}.py')\n")
    script = (
        "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
        "from runtime.launch import Launcher\n"
        "with Launcher() as launcher:\n"
        "    with launcher.start('tests.runtime.launch_jobs:total', {}, ranks=2,\n"
        "        threads_per_rank=1, memory_limit_bytes=None, deadline_seconds=60) as group:\n"
        "        print([event.data for event in group.events()], group.end.outcome.value)\n"
        "print('torch' in sys.modules)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[{'value': 3.0}, {'value': 3.0}] ok", "False"]


def test_rank_events_are_plain_records() -> None:
    assert RankEvent(0, "step", {"index": 1}) == RankEvent(0, "step", {"index": 1})
