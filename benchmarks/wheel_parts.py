# SPDX-License-Identifier: Apache-2.0
"""Wheels for a GPU machine that reaches no package index: downloaded here, cut into parts, unpacked there."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

PART_BYTES = 55 << 20
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64", "any")
UNPACK = """\
#!/usr/bin/env bash
# Build ~/gpu/site-{name} from the parts that {script} made.
set -euo pipefail
cd ~/gpu
mkdir -p {name}-wheels site-{name}
cat {name}.[0-9][0-9] | tar x -C {name}-wheels
python3 - <<'P'
import zipfile
from pathlib import Path
for wheel in sorted(Path("{name}-wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall("site-{name}")
P
{more}rm -rf {name}-wheels {name}.[0-9][0-9]
echo "ready: PYTHONPATH=$HOME/gpu/site-{name}"
"""


def fresh_folder(out: Path) -> Path:
    """An empty folder for wheels below an emptied `out`."""
    shutil.rmtree(out, ignore_errors=True)
    work = out / "work"
    work.mkdir(parents=True)
    return work


def download(folder: Path, needed: Sequence[str]) -> None:
    """The wheels for Python 3.12, also if another Python runs this."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "-d", str(folder), *needed], check=True)


def write_parts(work: Path, name: str, script: str, *, more: str = "") -> None:
    """Turn the wheels in `work` into parts beside it, the last with the script that unpacks all; `more` are its lines
    after unpacking.
    """
    out, wheels = work.parent, sorted(work.glob("*.whl"))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for wheel in wheels:
            tar.add(wheel, wheel.name)
    content = buffer.getvalue()
    parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    for number, part in enumerate(parts, 1):
        folder = out / str(number)
        folder.mkdir()
        (folder / f"{name}.{number:02d}").write_bytes(part)
    (out / str(len(parts)) / f"unpack-{name}.sh").write_text(UNPACK.format(name=name, script=script, more=more))
    shutil.rmtree(work)
    sys.stdout.write(f"{len(wheels)} wheels, {len(content) / 2**20:.0f} MiB in {len(parts)} parts under {out}/\n")
