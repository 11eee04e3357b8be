from __future__ import annotations

import re
import subprocess
import sys

import pytest

from lightning_distplus.cli.__main__ import COMMANDS, main


def test_help_lists_every_command_and_loads_no_torch() -> None:
    code = "import sys\nfrom lightning_distplus.cli.__main__ import main\ntry: main(['-h'])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules, 'lightning' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert all(name in found.stdout for name in COMMANDS)
    assert found.stdout.endswith("False False\n")


WRONG = {
    "": "commands:\n  init        write a starting point",
    "lanch": "there is no command 'lanch'; did you mean launch?",
    "nonsense": "there is no command 'nonsense'; distplus --help lists the commands",
    "launch --nproc x train.py": "'x' is no number, and none of gpu, cpu and auto",
    "launch --nnodes 3:2 -- fit": "'3:2' is neither a number of hosts nor MIN:MAX",
    "launch --nnodes 2 --rdzv a:b -- fit": "--rdzv a:b: behind the colon stands a port",
    "launch --join 5q -- fit": "argument --join: the value is '5q', which is no duration. Accepted: ",
    "launch slurm --nodes 0 -- fit": "nodes is 0; it is at least 1",
    "launch slurm --same-step 0 -- fit": "same_step is 0; it is at least 1",
    "preflight --deadline 5q": "argument --deadline: the value is '5q', which is no duration",
    "report . --mtbf -1": "argument --mtbf: ",
    "report . --html nowhere/x.html": "there is no folder nowhere",
    "rehearse --world 0": "--world is at least 1",
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_command_line_ends_with_2_and_the_reason(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    assert ended.value.code == 2
    assert WRONG[typed] in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_explains_itself_in_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out.replace("[options] ", "")
    own = text[text.find("\nexamples:") :] if COMMANDS[name].keeps_name else text  # the rest is LightningCLI's
    assert [line for line in own.splitlines() if len(line) > 80] == []
    assert f"distplus {name}" in text
    assert re.search(rf"^  .*distplus {name} ", text, re.MULTILINE)  # an example


def test_a_shell_completes_commands_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, sign in (("fish", "-l 'max-restarts'"), ("zsh", "bashcompinit"), ("bash", "--max-restarts")):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert sign in script
        assert "trainer.max_steps" in script
    asked = f"{script}\nCOMP_WORDS=(distplus verify --d); COMP_CWORD=2; _distplus; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout == "--deep\n"


def test_bad_input_of_prepare_is_one_line_and_exit_code_1(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("distplus prepare: The input")
    assert error.count("\n") == 1
