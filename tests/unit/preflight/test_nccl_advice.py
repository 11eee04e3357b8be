"""Advice by evidence: what the files of a host and its variables say; without the evidence nothing is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_distplus.preflight import Facts, Status
from lightning_distplus.preflight.finding import Finding
from lightning_distplus.preflight.gpus import links, query
from lightning_distplus.preflight.nccl_advice import advise
from tests.faults.test_gpus import stand_in

GUEST = "processor\t: 0\nflags\t\t: fpu vme hypervisor lahf_lm\n"
METAL = "processor\t: 0\nflags\t\t: fpu vme lahf_lm\n"
LINKED = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s"


@pytest.fixture(autouse=True)
def asks_again() -> Iterator[None]:
    """What nvidia-smi has said is kept for the life of a process."""
    for one in (query, links):
        one.cache_clear()
    yield
    for one in (query, links):
        one.cache_clear()


class Host:
    """The files that the advice reads, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.infiniband = folder / "infiniband"
        self.processors = folder / "cpuinfo"

    def advise(self, **variables: str) -> list[Finding]:
        found = list(advise(Facts(variables=variables), infiniband=self.infiniband, processors=self.processors))
        assert all(one.status is Status.ADVICE and "https://" in one.detail and one.remedy for one in found)
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_rdma_that_is_switched_off_is_told_where_the_host_has_devices(host: Host) -> None:
    assert host.advise(NCCL_IB_DISABLE="1") == []  # no such folder: no driver
    host.infiniband.mkdir()
    assert host.advise(NCCL_IB_DISABLE="1") == []  # a driver, and no device
    for name in ("mlx5_1", "mlx5_0"):
        (host.infiniband / name).mkdir()
    (found,) = host.advise(NCCL_IB_DISABLE="1")
    assert found.subject == "NCCL may not use the RDMA devices that this host has."
    assert found.detail.startswith("NCCL_IB_DISABLE=1; mlx5_0, mlx5_1 ")
    assert host.advise() == host.advise(NCCL_IB_DISABLE="0") == []


def test_gpus_of_a_virtual_machine_without_nvlink_are_told_of(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, {}, {"index": "1"}))
    assert host.advise() == []  # no such file
    host.processors.write_text(METAL)
    assert host.advise() == []
    host.processors.write_text(GUEST)
    (found,) = host.advise()
    assert "several GPUs without NVLink, and runs in a virtual machine" in found.subject
    assert found.detail.startswith(f"2 GPUs (NVIDIA H100), no NVLink, a hypervisor in {host.processors} ")
    assert host.advise(NCCL_P2P_DISABLE="1") == []  # it is off already, and no NVLink is there


@pytest.mark.parametrize("variables", [{}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}])
def test_nvlink_needs_peer_to_peer(
    variables: dict[str, str], host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, {}, {"index": "1"}, links=LINKED))
    host.processors.write_text(GUEST)
    subjects = [one.subject for one in host.advise(**variables)]
    assert subjects == (["NCCL may not use the NVLink that this host has."] if variables else [])


def test_one_gpu_has_no_peers(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, {}))
    host.processors.write_text(GUEST)
    assert host.advise() == []


def test_every_call_in_the_log_is_told_unless_it_goes_into_a_file(host: Host) -> None:
    for level in ("TRACE", "trace"):
        (found,) = host.advise(NCCL_DEBUG=level)
        assert found.subject == "NCCL_DEBUG=TRACE writes every call of every rank into its log."
        assert f"NCCL_DEBUG={level}, NCCL_DEBUG_FILE unset" in found.detail
    assert host.advise(NCCL_DEBUG="TRACE", NCCL_DEBUG_FILE="/tmp/nccl.%h.%p") == []
    assert host.advise(NCCL_DEBUG="WARN") == host.advise(NCCL_DEBUG="INFO") == []


@pytest.mark.parametrize(("size", "is_told"), [(4 << 20, False), (16 << 20, False), (17 << 20, True)])
def test_a_large_buffer_is_told_with_its_size(size: int, is_told: bool, host: Host) -> None:
    found = host.advise(NCCL_BUFFSIZE=str(size))
    assert [f"{size >> 20} MiB; sends that fit a buffer" in one.detail for one in found] == [True] * is_told


def test_names_of_old_are_told_where_the_new_one_is_not_set(host: Host) -> None:
    for name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"):
        (found,) = host.advise(**{name: "1"})
        assert found.subject == f"{name} is the old name of TORCH_{name}."
        assert host.advise(**{name: "1", f"TORCH_{name}": "1"}) == []
