from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from lightning_distplus import env
from lightning_distplus.errors import PreflightError
from lightning_distplus.preflight import LAUNCH_CHECKS, Facts, Finding, Status, raise_errors, run_checks
from lightning_distplus.preflight.agreement import as_message, merged


def fails(facts: Facts) -> Iterator[Finding]:
    yield Finding(status=Status.ERROR, subject=f"{facts.host} is on fire.", detail="300 K", remedy="leave it")


def breaks(facts: Facts) -> Iterator[Finding]:
    raise KeyError("no such file")


def test_a_check_of_ones_own_is_a_function_of_the_facts() -> None:
    facts = Facts(variables={}, host="h", command=("train.py",))
    (finding,) = run_checks({"fire": fails}, facts)
    assert (finding.check, finding.status, finding.subject) == ("fire", Status.ERROR, "h is on fire.")
    with pytest.raises(PreflightError, match=r"fire.\n  seen: 300 K\n  do:   leave it\n  here: host h; started"):
        raise_errors([finding], facts)


def test_a_check_that_is_off_is_not_run_and_one_that_warns_raises_nothing() -> None:
    facts = Facts(variables={})
    assert run_checks({"fire": fails, "broken": breaks}, facts, {"fire": "off", "broken": "off"}) == []
    (finding,) = run_checks({"fire": fails}, facts, {"fire": "warn"})
    assert finding.status is Status.WARNING
    raise_errors([finding], facts)


def test_a_check_that_raises_is_a_warning_that_names_it() -> None:
    (finding,) = run_checks({"broken": breaks}, Facts(variables={}))
    assert finding.status is Status.WARNING
    assert "'broken' could not be made" in finding.subject
    assert "no such file" in finding.detail


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}, "torchrun"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, "srun"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967290"}, "plain python in a Slurm job"),  # salloc's own step
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, "plain python in a Slurm job"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"CROSS_SIZE": "1", "LOCAL_RANK": "0"}, "the DeepSpeed launcher"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "a Kubernetes job"),
        ({}, "plain python"),
    ],
)
def test_the_launcher_is_known_by_what_only_it_sets(variables: dict[str, str], name: str) -> None:
    assert Facts(variables=variables).launcher.partition(" (")[0] == name


GPUS = {"environment": "LightningEnvironment", "accelerator": "cuda", "num_nodes": 1}


@pytest.mark.parametrize(
    ("visible", "local_rank", "words"),
    [
        ("0,1", None, "sees 2 GPUs, and Trainer(devices=4) needs 4"),
        ("", None, "sees 0 GPUs"),
        ("3", "3", "sees 1 GPUs"),
        ("0,1,1,2", None, "One GPU is named twice"),
    ],
)
def test_gpus_that_a_process_cannot_see_or_share_are_named(visible: str, local_rank: str | None, words: str) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": visible} | ({} if local_rank is None else {"LOCAL_RANK": local_rank})
    (finding,) = run_checks(LAUNCH_CHECKS, Facts(variables=variables, devices=4, **GPUS))  # type: ignore[arg-type]
    assert (finding.check, finding.status) == ("gpus", Status.ERROR)
    assert words in finding.subject
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in finding.detail


HEALTHY = {
    "one process": ({}, {"devices": 1, "num_nodes": 1}),
    "Lightning starts two": ({}, {"devices": 2, "num_nodes": 1}),
    "a batch job of one task": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"},
        {"devices": 1, "num_nodes": 1, "environment": "SLURMEnvironment", "started": 1, "rank": 0},
    ),
    "srun, with MPI's variables as pmi2 sets them": (
        {
            "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "PMI_SIZE": "4", "PMI_RANK": "3", "RANK": "0",
        },
        {"devices": 2, "num_nodes": 2, "environment": "SLURMEnvironment", "started": 4, "rank": 3},
    ),
    "one torchrun a node, by srun": (
        {
            "TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8",
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2",
            "MASTER_ADDR": "127.0.0.1",
        },
        {"devices": 4, "num_nodes": 2, "environment": "TorchElasticEnvironment", "started": 8, "rank": 5},
    ),
    "one torchrun for each GPU": (
        {
            "TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8",
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1",
        },
        {"devices": 1, "num_nodes": 8, "environment": "TorchElasticEnvironment", "started": 8, "rank": 5},
    ),
    "two nodes by hand": (
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1"},
        {"devices": 2, "num_nodes": 2, "rank": 2},
    ),
    "a process that Lightning started in a PyTorchJob's pod with NODE_RANK=$RANK": (
        {
            "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1", "RANK": "1", "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
        },
        {"devices": 2, "num_nodes": 2, "rank": 3, "started": 4},
    ),
    "DeepSpeed's launcher on one node": (
        {"CROSS_SIZE": "1", "CROSS_RANK": "0", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        {"devices": 2, "num_nodes": 1, "rank": 1, "started": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_legal_launch_has_no_finding(name: str) -> None:
    variables, expected = HEALTHY[name]
    facts = Facts(variables=variables, **{"environment": "LightningEnvironment", **expected})  # type: ignore[arg-type]
    assert run_checks(LAUNCH_CHECKS, facts) == []


def test_every_variable_that_the_checks_read_is_in_the_table() -> None:
    assert len(set(env.LAUNCH_VARIABLES)) == len(env.LAUNCH_VARIABLES)


def test_commands_name_the_script_as_it_was_started() -> None:
    facts = Facts(variables={}, devices=8, num_nodes=4, command=("train.py", "--config", "a b.yaml"))
    assert facts.srun() == "srun --nodes 4 --ntasks-per-node 8 python train.py --config 'a b.yaml'"
    assert facts.torchrun().startswith("torchrun --nnodes 4 --nproc-per-node 8 --node-rank $NODE_RANK --master-addr")
    one = Facts(variables={}, devices=8, num_nodes=1, command=("train.py",))
    assert one.torchrun() == "torchrun --standalone --nproc-per-node 8 train.py"


@pytest.mark.parametrize(
    ("variables", "accelerator", "status"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, "cpu", None),
        ({"GLOO_SOCKET_IFNAME": "l"}, "cpu", Status.ERROR),  # gloo wants whole names
        ({"NCCL_SOCKET_IFNAME": "l"}, "cuda", None),  # NCCL takes beginnings
        ({"NCCL_SOCKET_IFNAME": "=l"}, "cuda", Status.ERROR),
        ({"NCCL_SOCKET_IFNAME": "nosuch,lo"}, "cuda", None),
        ({"NCCL_SOCKET_IFNAME": "nosuch"}, "cuda", Status.ERROR),
        ({"NCCL_SOCKET_IFNAME": "nosuch"}, "cpu", Status.WARNING),  # nothing uses it
        ({"NCCL_SOCKET_IFNAME": "^nosuch"}, "cuda", None),
    ],
)
def test_an_interface_that_is_named_must_be_there(
    variables: dict[str, str], accelerator: str, status: Status | None
) -> None:
    found = run_checks(LAUNCH_CHECKS, Facts(variables=variables, accelerator=accelerator))
    assert [finding.status for finding in found] == ([] if status is None else [status])
    if status is not None:
        ((name, value),) = variables.items()
        assert f"{name}={value}" in found[0].subject
        assert "lo" in found[0].detail


def test_a_check_that_hangs_is_a_warning_and_the_others_are_made() -> None:
    ends = threading.Event()

    def hangs(facts: Facts) -> Iterator[Finding]:
        ends.wait(30)
        return iter(())

    def speaks(facts: Facts) -> Iterator[Finding]:
        yield Finding(status=Status.NOTE, subject="here")

    checks = {"speaks": speaks, "hangs": hangs}
    findings = run_checks(checks, Facts(variables={}), deadline=timedelta(seconds=0.5))
    ends.set()
    assert [(found.check, found.status) for found in findings] == [("speaks", Status.NOTE), ("hangs", Status.WARNING)]
    assert "'hangs' had not ended" in findings[1].subject


def test_what_several_ranks_find_is_said_once_with_the_host_of_the_lowest() -> None:
    low, other = (
        Finding(check="disk", status=Status.ERROR, subject=text, detail="4 MB/s") for text in ("slow", "full")
    )
    found = merged([as_message("a", []), as_message("b", [low]), as_message("c", [low, other]), as_message("d", [low])])
    assert [(one.subject, one.detail) for one in found] == [
        ("slow", "host b, rank 1: 4 MB/s (and ranks 2-3)"),
        ("full", "host c, rank 2: 4 MB/s"),
    ]
