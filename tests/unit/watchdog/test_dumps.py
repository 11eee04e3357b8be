"""Dumps of torch's recorder as files: read without running what they hold, refused in words, judged."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.testing import spawn
from lightning_distplus.watchdog.flight_recorder import DumpError, Recording, load_dumps, read_recordings
from lightning_distplus.watchdog.verdict import judge_dumps


def read_dumps(folder: Path) -> dict[int, Recording]:
    return read_recordings(load_dumps(folder))


def entry(group: str, seq: int, **changes: Any) -> dict[str, Any]:
    return {
        "record_id": 0,
        "pg_id": int(group),
        "process_group": [group, "pair"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": seq,
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "is_p2p": False,
        **changes,
    }


def dump(*entries: dict[str, Any], ranks: str = "[0, 1]", **changes: Any) -> dict[str, Any]:
    config = {"7": {"name": "7", "desc": "pair", "ranks": ranks}}
    return {"version": "2.9", "pg_config": config, "entries": list(entries), **changes}


def written(folder: Path, *dumps: dict[str, Any]) -> Path:
    for rank, one in enumerate(dumps):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(one, protocol=2))
    return folder


def part(op: str, peer: int, seq: int, **changes: Any) -> dict[str, Any]:
    arrow = f"0{'->' if op == 'send' else '<-'}{peer}"
    return entry("7", 0, profiling_name=f"nccl:{op} {arrow}", p2p_seq_id=seq, is_p2p=True, **changes)


def batch_end(seq: int, state: str) -> dict[str, Any]:
    nothing = {"input_sizes": [], "output_sizes": [], "input_dtypes": [], "output_dtypes": []}
    return entry("7", 0, profiling_name="nccl:coalesced", p2p_seq_id=seq, is_p2p=True, state=state, **nothing)


def test_the_parts_of_a_batch_have_the_state_of_its_kernel(tmp_path: Path) -> None:
    first = [part("send", 1, 1), part("recv", 1, 1), batch_end(1, "completed")]
    second = [part("send", 1, 2), part("recv", 1, 2), batch_end(2, "scheduled")]
    (found,) = read_dumps(written(tmp_path, dump(*first, *second))).values()
    assert [(one.op, one.peer, one.seq, one.is_done) for one in found.calls] == [
        ("send", 1, 1, True),
        ("recv", 1, 1, True),
        ("send", 1, 2, False),
        ("recv", 1, 2, False),
    ]


def test_parts_that_a_dump_of_active_calls_keeps_for_ever_are_not_in_flight(tmp_path: Path) -> None:
    (found,) = read_dumps(written(tmp_path, dump(part("send", 1, 1), part("recv", 1, 1), entry("7", 3)))).values()
    assert [one.seq for one in found.unfinished] == [3]


def test_in_a_dump_of_active_calls_the_batches_of_a_group_end_in_order(tmp_path: Path) -> None:
    left_by_the_ring = part("recv", 1, 1)
    ended = [part("send", 1, 2), part("recv", 1, 2)]
    runs = [part("send", 1, 3), part("recv", 1, 3), batch_end(3, "scheduled")]
    dumps = [
        dump(left_by_the_ring, *ended, *runs, part("send", 1, 4)),
        dump(left_by_the_ring, *ended, part("send", 1, 3)),
    ]
    found = read_dumps(written(tmp_path, *dumps))
    assert {rank: [one.seq for one in record.unfinished] for rank, record in found.items()} == {0: [3, 3, 4], 1: [3]}


def test_a_collective_before_a_batch_of_its_group_that_runs_is_in_flight_itself(tmp_path: Path) -> None:
    parts = [entry("7", 2), entry("7", 2), entry("7", 2, profiling_name="nccl:coalesced", input_sizes=[])]
    (found,) = read_dumps(written(tmp_path, dump(entry("7", 1), *parts))).values()
    assert [one.seq for one in found.unfinished] == [1, 2, 2]


def test_a_call_that_has_timed_out_is_not_done_and_one_that_gloo_retired_is(tmp_path: Path) -> None:
    gloo = entry("7", 2, profiling_name="gloo:all_reduce", retired=True)
    (found,) = read_dumps(written(tmp_path, dump(entry("7", 1, retired=True), gloo))).values()
    assert [one.is_done for one in found.calls] == [False, True]


def test_groups_of_one_name_and_other_ranks_are_two(tmp_path: Path) -> None:
    found = read_dumps(written(tmp_path, dump(entry("7", 1)), dump(entry("7", 1), ranks="[1, 2]")))
    assert [list(one.groups.values()) for one in found.values()] == [[[0, 1]], [[1, 2]]]
    assert found[0].calls[0].group != found[1].calls[0].group


def test_the_verdict_is_that_of_a_live_job_with_the_line_of_the_call(tmp_path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
        {"name": "run", "filename": "/x/lib/python3.14/threading.py", "line": 7},  # of the host of the dump
        {"name": "train", "filename": "/x/lib/python3.14/site-packages/their_package/train.py", "line": 12},
    ]
    verdict = judge_dumps(written(tmp_path, dump(entry("7", 1, frames=frames)), dump()))
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.is_decided) == ("hang", [1], [0], True)
    assert verdict.locations["0"] == "/x/lib/python3.14/site-packages/their_package/train.py:12"
    assert "rank 1 has an empty record" in verdict.render()
    assert "step 0" not in verdict.render()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(dump(entry("7", 1), extra=Evil())), "names posix.system"),
        (b"\x80\x02}(X", "cut short"),
        (b'{"version": "2.9"', "cut short"),
        (json.dumps({"version": "2.9", "entries": []}).encode(), "lacks pg_config"),
        (json.dumps(dump(version="3.0")).encode(), "version 3.0"),
        (pickle.dumps([1, 2]), "lacks version"),
        (json.dumps(dump({"record_id": 1})).encode(), "entry"),
    ],
)
def test_a_file_that_is_no_dump_is_refused_and_nothing_in_it_runs(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(content)
    with pytest.raises(DumpError, match=says):
        judge_dumps(tmp_path)
    assert not Path("ran").exists()


def test_a_folder_without_dumps_or_with_two_of_a_rank_or_without_a_hang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="does not exist"):
        judge_dumps(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DumpError, match="no file name ends with a rank"):
        judge_dumps(tmp_path)
    written(tmp_path, dump(entry("7", 1, state="completed")))
    with pytest.raises(DumpError, match="no rank had a call in flight"):
        judge_dumps(tmp_path)
    (tmp_path / "nccl_trace_rank_0.json").write_text("{}")
    with pytest.raises(DumpError, match="both of rank 0"):
        judge_dumps(tmp_path)


def leave_a_dump(rank: int, folder: str) -> None:
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=3)
    dist.all_reduce(torch.ones(4))
    work = dist.all_reduce(torch.ones(2), async_op=True) if rank < 2 else None
    dumped = c10d._dump_fr_trace(True, True, False)
    dumped = dumped if rank else c10d._dump_fr_trace_json(True, False)
    (Path(folder) / f"trace_{rank}").write_bytes(dumped)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"written-{rank}", "")
    store.wait([f"written-{one}" for one in range(3)])
    del work
    os._exit(0)


def test_dumps_that_torch_itself_wrote_are_judged(tmp_path: Path) -> None:
    spawn(leave_a_dump, 3, args=(str(tmp_path),))
    found = read_dumps(tmp_path)
    assert [type(one) for one in found.values()] == [Recording] * 3
    assert judge_dumps(tmp_path).culprits == [2]
