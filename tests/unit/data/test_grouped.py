"""Groups of micro-batches through shared memory: what workers give is what this process would have read."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from lightning_distplus.data import MegatronWriter, grouped
from lightning_distplus.data.grouped import GroupFetcher, groups_of
from lightning_distplus.data.loader import SampleLoader, WorkerOptions
from lightning_distplus.data.request import Request
from lightning_distplus.data.sources import Source, open_source
from lightning_distplus.data.token_fetcher import TokenFetcher

SEQ_LEN = 6
NUM_SAMPLES = 150
BATCH = 3


@pytest.fixture
def _worker_handler() -> Iterator[None]:
    """torch sets a handler for SIGCHLD with its first worker, and never takes it back."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two files of differing token types, whose documents have 5 to 11 tokens."""
    folder, draw, opened = tmp_path_factory.mktemp("sources"), np.random.default_rng(0), []
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        with MegatronWriter(folder / name, dtype) as writer:
            left = NUM_SAMPLES * SEQ_LEN + 1
            while left > 0:
                length = min(left, int(draw.integers(5, 12)))
                writer.add_document(draw.integers(0, 1000, length))
                left -= length
        opened.append(open_source(Source(path=str(folder / name)), SEQ_LEN))
    return opened


def requests(first: int = 0, num_batches: int = 40) -> list[Request]:
    positions = np.arange(BATCH * num_batches).reshape(num_batches, BATCH)
    ids = np.stack([positions % 2, (7 * positions) % NUM_SAMPLES], axis=2)
    whole = [Request(ids[number], positions[number], 4) for number in range(first, num_batches)]
    return [*whole, Request(ids[0][:1], positions[0][:1], 4)]  # as validation ends: with a smaller one


def loader(sources: list[Any], plan: list[Request], workers: int, **options: Any) -> SampleLoader:
    return SampleLoader(
        TokenFetcher(sources, names=["a", "b"], seq_len=SEQ_LEN, vocab_size=1000, position_ids=True, document_ids=True),
        plan=lambda: plan,
        num_batches=lambda: len(plan),
        options=WorkerOptions(num_workers=workers, **options),
    )


def same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> bool:
    assert [one.keys() for one in found] == [one.keys() for one in expected]
    return all(torch.equal(one[name], two[name]) for one, two in zip(found, expected, strict=True) for name in one)


def test_groups_begin_with_one_micro_batch_and_grow_to_what_a_slot_holds(
    sources: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = TokenFetcher(sources, names=["a", "b"], seq_len=SEQ_LEN, vocab_size=None)
    monkeypatch.setattr(grouped, "_SLOT_BYTES", 16 * fetcher.bytes_per_sample)
    groups = list(groups_of(requests(), GroupFetcher(fetcher, num_groups=2, num_samples=BATCH)))
    assert [len(group.sizes) for group in groups] == [1, 2, 4, *[5] * 6, 4]
    assert [group.slot for group in groups] == [number % 3 for number in range(len(groups))]
    assert [size for group in groups for size in group.sizes] == [*[3] * 40, 1]
    one_each = GroupFetcher(fetcher, num_groups=2, num_samples=17)
    assert [len(group.sizes) for group in groups_of(requests(), one_each)][:4] == [1, 2, 4, 5]
    monkeypatch.setattr(grouped, "_SLOT_BYTES", 1)
    at_least_one = GroupFetcher(fetcher, num_groups=2, num_samples=BATCH)
    assert {len(group.sizes) for group in islice(groups_of(requests(), at_least_one), 40)} == {1}


@pytest.mark.usefixtures("_worker_handler")
@pytest.mark.parametrize("micro_batches_of_a_slot", [1, 5, 1000])
def test_workers_give_what_this_process_reads_from_any_micro_batch_on(
    micro_batches_of_a_slot: int, sources: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = loader(sources, [], 0)._fetcher.bytes_per_sample
    monkeypatch.setattr(grouped, "_SLOT_BYTES", BATCH * size * micro_batches_of_a_slot)
    expected = list(loader(sources, requests(), 0))
    for first in (0, 1, 2, 6, 9, 39):
        plan = requests(first)
        with_workers = loader(sources, plan, 1 + first % 2, prefetch_factor=1 + first % 3)
        found = []
        for batch, asked in zip(with_workers, plan, strict=True):
            found.append(batch)  # and kept: no later batch may be written over it
            delivered = with_workers.delivered
            assert delivered is not None
            assert delivered.epoch == asked.epoch
            assert np.array_equal(delivered.ids, asked.ids)
            assert np.array_equal(delivered.positions, asked.positions)
        assert same(found, expected[first:]), first


@pytest.mark.usefixtures("_worker_handler")
def test_a_worker_of_a_pass_that_was_left_does_not_write_into_the_next_one(
    sources: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held up until the worker of the next pass has filled the slot of the same number."""
    may_go_on, written = multiprocessing.Event(), [multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)]
    fetch = GroupFetcher.__getitems__

    def fetch_when_allowed(self: GroupFetcher, group: Any) -> Any:
        is_left = bool(group.request.positions[0] >= BATCH * 20)
        if is_left and group.slot:
            assert may_go_on.wait(60)
        taken = fetch(self, group)
        written[is_left].release()
        return taken

    monkeypatch.setattr(GroupFetcher, "__getitems__", fetch_when_allowed)
    plans = [requests(20), requests(0, 20)]
    expected = list(loader(sources, plans[1], 0))
    with_workers = loader(sources, [], 1, prefetch_factor=1)
    monkeypatch.setattr(with_workers, "_plan", lambda: plans.pop(0))
    left, next_one = iter(with_workers), iter(with_workers)
    next(left)
    found = [next(next_one)]
    assert all(written[False].acquire(timeout=60) for _ in range(2))
    may_go_on.set()
    assert all(written[True].acquire(timeout=60) for _ in range(2))
    found += [next(next_one), next(next_one)]
    assert same(found, expected[:3])
    left.close()
    next_one.close()


@pytest.mark.usefixtures("_worker_handler")
def test_workers_that_persist_finish_a_pass_that_was_left_before_the_next_one(sources: list[Any]) -> None:
    plans = [requests(20), requests(), requests(7), requests(30)]
    expected = [list(loader(sources, plan, 0)) for plan in plans]
    with_workers = loader(sources, [], 2, persistent_workers=True)
    with_workers._plan = lambda: plans.pop(0)
    for whole, num_read in zip(expected, (1, 8, 3, len(expected[3])), strict=True):
        assert same(list(islice(iter(with_workers), num_read)), whole[:num_read])
    with_workers.close()


def test_shared_memory_is_not_asked_for_without_workers(sources: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped.multiprocessing, "RawArray", None)
    assert len(list(loader(sources, requests(), 0))) == 41
