"""The README is true: its script is the one that comes with the package, its table is tested, its links lead somewhere.

What it tells to type is typed in ``tests/distributed/test_installed.py``, from an installed wheel.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_distplus import recipes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_readme_fits_on_a_few_screens_and_has_its_order() -> None:
    assert len(README.splitlines()) <= 250
    assert re.findall(r"^## (.*)$", README, flags=re.MULTILINE) == [
        "Install",
        "Train, kill, go on",
        "Three more tasks",
        "What goes wrong, and what happens then",
        "Beside others",
        "Links",
    ]
    assert README.index("docs/assets/verdict.svg") < README.index("## Install")


def test_the_diff_makes_the_script_of_init_of_a_stock_one() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    lines = diff.splitlines()
    ours = [line[1:] for line in lines if not line.startswith("-")]
    assert ours == Path(recipes.__file__).with_name("train.py").read_text().splitlines()
    stock = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    compile(stock, "stock.py", "exec")
    assert "distplus" not in stock


# The tests that plant the fault of each row, by the first words of the row.
TESTS = {
    "a rank never comes": "test_missing_rank_is_named_by_the_ranks_that_came",
    "wrong launcher": "test_a_wrong_launch_ends_at_once_with_its_evidence_and_the_command_to_run "
    "test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on",
    "duplicate or swapped": "test_hosts_that_cannot_meet_say_why_and_name_each_other",
    "versions, git": "test_the_odd_rank_is_named_before_the_first_step",
    "the launcher starts another": "test_a_wrong_launch_ends_at_once_with_its_evidence_and_the_command_to_run",
    "a rank hangs": "test_a_fault_in_a_strangers_script_ends_it_as_the_table_says "
    "test_a_stopped_process_is_named_and_does_not_outlive_the_run "
    "test_a_call_that_holds_the_global_lock_is_named",
    "ranks call different": "test_a_rank_that_leaves_the_common_sequence_is_named",
    "every stage": "test_two_rings_that_send_before_they_receive_are_drawn_with_the_line_of_each_rank",
    "a host is cut off": "test_a_host_that_is_cut_off_is_named_on_both_sides",
    "one rank works alone": "test_a_rank_that_works_alone_at_the_end_finishes_and_nobody_is_blamed",
    "one rank's run or epoch ends": "test_a_rank_that_ends_in_the_middle_is_named_with_its_batch",
    "a rank raises": "test_a_fault_in_a_strangers_script_ends_it_as_the_table_says "
    "test_a_killed_rank_is_lost_within_seconds",
    "rank-0-only code": "test_both_ranks_show_both_calls_and_both_lines",
    "a NaN on one rank": "test_a_fault_in_a_strangers_script_ends_it_as_the_table_says "
    "test_a_skipped_step_changes_no_weight_and_no_optimizer_state_on_any_rank",
    "a bit of a weight": "test_a_flipped_bit_is_named_with_parameter_and_element_before_the_next_step "
    "test_a_shard_that_changes_between_two_steps_is_named_by_the_rank_that_holds_it",
    "a rank is one step off": "test_a_rank_that_leaves_out_a_sum_of_gradients_is_named_before_it_steps",
    "learning rate": "test_whoever_differs_is_named_by_all_ranks_with_both_values",
    "two ranks train on": "test_whoever_differs_is_named_by_all_ranks_with_both_values",
    "one rank stops": "test_all_ranks_stop_and_validate_at_the_same_step "
    "test_whoever_differs_is_named_by_all_ranks_with_both_values",
    "a rank is killed in the middle": "test_run_killed_inside_an_epoch_repeats_and_misses_nothing",
    "stopped in the last epoch": "test_chain_of_stopped_runs_is_the_undisturbed_run",
    "resume far": "test_place_of_a_million_batches_is_reached_at_once",
    "an iterable data set": "test_each_rank_goes_on_with_its_own_state_of_iterable_data",
    "dropout": "test_resume_from_every_save_is_the_undisturbed_run",
    "data, seed or mixture": "test_other_map_data_is_refused_with_both_sides "
    "test_other_tokens_are_refused_with_both_sides",
    "a killed script": "test_a_killed_script_goes_on_from_its_own_checkpoint_and_says_so",
    "the same batch fails": "test_a_batch_that_kills_every_time_ends_the_job_with_its_samples "
    "test_samples_that_fail_every_time_are_set_apart_and_the_order_of_all_others_stays",
    "killed while saving": "test_killed_while_saving_the_newest_checkpoint_is_the_live_state_of_its_step",
    "killed while `last.ckpt`": "test_killed_while_it_is_replaced_the_last_checkpoint_is_found_by_each_choice",
    "gone back": "test_run_that_went_back_on_purpose_goes_on_from_there",
    "one flipped bit in a checkpoint": "test_a_changed_byte_is_refused_on_all_ranks_by_file",
    "a checkpoint of a stranger": "test_no_pickle_of_a_stranger_runs_in_fit_verify_or_export",
    "a full disk": "test_a_full_disk_costs_one_checkpoint_and_not_the_run test_any_file_of_a_save_may_fail",
    "ZeRO on another": "test_zero_on_another_number_of_ranks_is_refused_with_the_command_that_converts",
    "SIGTERM to some": "test_a_fault_in_a_strangers_script_ends_it_as_the_table_says "
    "test_a_signal_at_any_moment_ends_the_job_as_documented",
    "the time limit": "test_a_job_that_is_told_of_its_limit_saves_is_requeued_once_and_continues_exactly",
    "FSDP's mesh groups": "test_every_process_group_has_the_deadline_of_its_phase",
}
NEEDS = ("the one line", "data module", "`distplus launch`", "`distplus launch slurm`", "`state_at_rest=True`")


def test_each_row_of_the_table_has_tests_that_are_there() -> None:
    table = README.split("## What goes wrong")[1].split("## Beside")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    for fault, *_, needs in rows:
        assert sum(fault.startswith(words) for words in TESTS) == 1, fault
        assert set(re.split(r"; (?:of a shard )?", needs)) <= set(NEEDS), fault
    assert len(rows) == len(TESTS)
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, flags=re.MULTILINE)}
    assert set(" ".join(TESTS.values()).split()) <= there


def test_every_place_in_the_tree_exists_and_none_is_left_out() -> None:
    (tree,) = re.findall(r"```text\n(lightning_distplus/\n.*?)```", ARCHITECTURE, flags=re.DOTALL)
    package, rest = tree.split("lightning_distplus/\n")[1].split("\nexamples/")
    named = {word.rstrip("/") for line in package.splitlines() for word in re.split(r"\s{2,}", line.strip())[0].split()}
    there = {path.name for path in (ROOT / "lightning_distplus").iterdir()}
    unnamed = {"__init__.py", "__pycache__", "py.typed"}
    assert named == {name for name in there - unnamed if not name.startswith(".")}
    for line in ("examples/" + rest).splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README + ARCHITECTURE))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()
