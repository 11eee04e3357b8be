"""``distplus completion bash|zsh|fish``: prints a script with all commands and options, for the shell to read."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress

__all__ = ["run_completion"]

_OPTION = re.compile(r"(?<![\w.-])--[a-zA-Z][\w.-]*")

_BASH = """\
_distplus() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} options
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W "{commands}" -- "$current"))
  elif [[ $current == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$current"))
  else COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _distplus distplus
"""


def run_completion(argv: Sequence[str]) -> int:
    """Prints the script; takes some seconds, because it asks every command for its options."""
    parser = argparse.ArgumentParser(prog="distplus completion", description="Prints completions for a shell.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell: str = parser.parse_args(argv).shell
    options = _options()
    if shell == "fish":
        print(_fish(options))
        return 0
    cases = "\n".join(f"    {name}) options='{' '.join(found)}' ;;" for name, found in options.items())
    script = _BASH.format(cases=cases, commands=" ".join(options))
    print(script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}")
    return 0


def _fish(options: Mapping[str, Sequence[str]]) -> str:
    lines = ["complete -c distplus -n __fish_use_subcommand -f -a '" + " ".join(options) + "'"]
    for name, found in options.items():
        of_command = f"complete -c distplus -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{of_command} -l '{option.removeprefix('--')}'" for option in found]
    return "\n".join(lines)


def _options() -> dict[str, list[str]]:
    """The long options of every command, as its help tells them."""
    from lightning_distplus.cli.__main__ import COMMANDS, main

    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        text = io.StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            main([name, "--help"])
        found[name] = sorted(set(_OPTION.findall(text.getvalue())))
    return found
