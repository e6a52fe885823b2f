"""`import curvescope.nn` loads torch, and of this package the kernels: nothing else that takes time."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
before = set(sys.modules)
import curvescope.nn
new = set(sys.modules) - before
packages = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
parts = {name.split(".")[1] for name in new if name.startswith("curvescope.")}
print(sorted(packages), sorted(parts))
"""


def test_the_import_is_light():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['curvescope'] ['core', 'kernels', 'nn']"
