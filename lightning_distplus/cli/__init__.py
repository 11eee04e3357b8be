"""The ``distplus`` command: parse, call, print, return. Importing this package loads no torch."""
