"""The command line, called in this process."""

from curvescope.cli import main


def call(*words, capsys=None):
    """Exit code, stdout and stderr of a command."""
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code or 0
    found = capsys.readouterr()
    return code, found.out, found.err
