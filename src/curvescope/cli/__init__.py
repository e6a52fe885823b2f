"""The command line: parse, call one function, print. Results go to stdout, the rest to stderr."""

from curvescope.cli.app import main

__all__ = ["main"]
