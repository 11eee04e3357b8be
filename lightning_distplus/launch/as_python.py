"""Runs a command as ``python <command>`` does, in an interpreter that is there already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

__all__ = ["run"]


def run(command: Sequence[str], first_path: str) -> None:
    """Runs a script, or ``-m`` and a module, as ``__main__``.

    Args:
        command: What follows the interpreter.
        first_path: The folder that this interpreter has put in front of ``sys.path``; another one takes its place.

    Raises:
        SystemExit: It has ended otherwise than by its last line.
    """
    sys.orig_argv = [sys.executable, *command]
    importlib.invalidate_caches()
    main = ModuleType("__main__")
    is_module = command[0] == "-m"
    sys.argv = list(command[1:] if is_module else command)
    _begin_path_with(str(Path.cwd()) if is_module else str(Path(command[0]).resolve().parent), first_path)
    sys.modules["__main__"] = main
    try:
        code = _load_module(main, command[1]) if is_module else _load_script(main, command[0])
        exec(code, vars(main))  # noqa: S102 - what an interpreter does
    except Exception as error:
        error.__traceback__ = _from_the_command_on(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _from_the_command_on(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        trace = trace.tb_next
    return trace


def _begin_path_with(folder: str, before: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        if before in sys.path:
            sys.path.remove(before)
        sys.path.insert(0, folder)


def _load_module(main: ModuleType, name: str) -> CodeType:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        why = f"({type(error).__name__}: {error})"
        raise SystemExit(f"{sys.executable}: Error while finding module specification for {name!r} {why}") from None
    code = _code(spec)
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    sys.argv[0] = str(spec.origin)
    vars(main).update(
        __spec__=spec, __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent
    )
    return code


def _code(spec: ModuleSpec | None) -> CodeType | None:
    load = getattr(spec and spec.loader, "get_code", None)
    return load(spec.name) if spec is not None and load is not None else None


def _load_script(main: ModuleType, path: str) -> CodeType:
    file = str(Path(path).absolute())
    loader = SourceFileLoader("__main__", file)
    try:
        source = loader.get_data(file)
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    vars(main).update(__file__=file, __cached__=None, __loader__=loader)
    return loader.source_to_code(source, file)
