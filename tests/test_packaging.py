"""What is built and committed: the wheel works elsewhere, no file names an index or a machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.cli import options
from tuner.results.store import DEVICE, RECORDS

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = {path.relative_to(ROOT) for path in (ROOT / "kernel_templates").rglob("*.jinja")}
TRY_THE_PACKAGE = """
import sys
from pathlib import Path
import tuner
from tuner import compile, kernels, templates

folder = Path(tuner.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
assert (folder / "py.typed").is_file() and (folder / "data" / "model_shapes.csv").is_file()
assert all((templates.TEMPLATE_DIR / family.template).is_file() for family in kernels.families())
rendered = templates.render("empty.comp.jinja", {})
print(len(compile.Compiler().compile(rendered, values={"unroll": 4}).spirv))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder))
    run(*build, str(ROOT), cwd=folder)
    return folder


@pytest.mark.slow
def test_sdist_has_sources_templates_and_licence_but_no_results(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {Path(*Path(name).parts[1:]) for name in sdist.getnames()}
    assert names >= TEMPLATES | {Path("LICENSE"), Path("tuner", "py.typed"), Path("Makefile")}
    assert not [name for name in names if name.parts[:1] == ("results",)]


@pytest.mark.slow
def test_wheel_works_in_another_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = tmp_path / "bin" / "python"
    venv.create(tmp_path, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    # The dependencies are those of this environment; its own kvtune is not seen this way.
    (packages,) = (tmp_path / "lib").glob("*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    assert int(run(str(python), "-I", "-c", TRY_THE_PACKAGE, cwd=tmp_path)) > 100
    installed = {
        Path("kernel_templates") / path.relative_to(packages / "tuner" / "kernel_templates")
        for path in (packages / "tuner" / "kernel_templates").rglob("*.jinja")
    }
    assert installed == TEMPLATES
    assert "Usage: tuner" in run(tmp_path / "bin" / "tuner", "--help", cwd=tmp_path)


def git(*arguments: str) -> str:
    """What git prints; skips the test where there is no repository."""
    found = shutil.which("git")
    if found is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git repository")
    return run(found, "-c", "safe.directory=*", *arguments, cwd=ROOT)


def committed_files() -> Iterator[Path]:
    """Files that git tracks or would add."""
    listed = git("ls-files", "-co", "--exclude-standard", "-z")
    return (ROOT / name for name in listed.split("\0") if (ROOT / name).is_file())


def test_git_ignores_what_a_user_measures_and_nothing_that_is_published() -> None:
    assert git("ls-files", "-ci", "--exclude-standard") == ""
    made = [options.RESULTS / "some-device" / name for name in (RECORDS, DEVICE, "spirv/a.spv")]
    kept = [options.RESULTS / "published" / "some-device" / RECORDS, options.RESULTS / "README.md"]
    assert git("check-ignore", *map(str, (*made, *kept))).split() == [str(path) for path in made]


def test_no_file_names_a_package_index_or_a_machine_path() -> None:
    index = r"--(extra-)?index-url|/simpl[e]/|py[p]i\.org|pythonhoste[d]"
    machine = "/wor[k]/|/root/[.]|/home/[a-z]"
    pattern = re.compile(f"{index}|{machine}".encode())
    found = [
        f"{path.relative_to(ROOT)}: {line[:120]!r}"
        for path in committed_files()
        for line in path.read_bytes().splitlines()
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_lock_pins_every_package_with_hashes_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text
    requirements = [block for block in re.split(r"\n(?=\w)", text) if not block.startswith("#")]
    assert len(requirements) > 30
    for block in requirements:
        assert re.match(r"[\w.-]+==[\w.]+", block), block
        assert "--hash=sha256:" in block, block


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))


def test_development_lock_extends_the_other_and_both_have_what_is_declared() -> None:
    run_pins, dev_pins = pins("requirements.lock"), pins("requirements-dev.lock")
    assert run_pins.items() <= dev_pins.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=;\s]", text, maxsplit=1)[0].lower() for text in requirements}

    assert names(project["dependencies"]) <= run_pins.keys()
    assert names(project["optional-dependencies"]["dev"]) <= dev_pins.keys()


@pytest.fixture
def bare_machine() -> Iterator[Path]:
    """A copy of the set-up where Python is too old and apt-get must not be run."""
    folder = Path(tempfile.mkdtemp(prefix="kvtune-"))
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "bin").mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "apt-get", "apt-cache"):
        stub = folder / "bin" / name
        stub.write_text("#!/bin/sh\necho ran >>ran-by-mistake\nexit 1\n" if "get" in name else "")
        stub.chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def without_root(machine: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of the copy as another user than root; what is in its `bin` comes first."""
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv to stop being root")
        command = ("setpriv", "--reuid=65534", "--clear-groups", *command)
    return subprocess.run(
        command,
        cwd=machine,
        env={"PATH": f"{machine / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("purpose", "extra"), [("run", ""), ("dev", " vulkan-validationlayers")])
def test_set_up_without_root_prints_the_command_and_stops(
    bare_machine: Path, purpose: str, extra: str
) -> None:
    done = without_root(bare_machine, "bash", "scripts/setup.sh", purpose)
    packages = f"python3 python3-venv libvulkan1 mesa-vulkan-drivers{extra}"
    line = f"sudo apt-get update && sudo apt-get install --no-install-recommends --yes {packages}"
    assert (done.returncode, line in done.stderr.replace("\n  ", "\n").splitlines()) == (2, True)
    assert not (bare_machine / "ran-by-mistake").exists()


def test_newest_mesa_without_root_prints_the_command_and_stops(bare_machine: Path) -> None:
    folder = bare_machine / "mesa"
    done = without_root(bare_machine, "bash", "scripts/newest-mesa.sh", str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"sudo scripts/newest-mesa.sh {folder}" in done.stderr
    assert not folder.exists()
    assert not (bare_machine / "ran-by-mistake").exists()


def test_newest_mesa_leaves_folders_of_others_alone(bare_machine: Path) -> None:
    done = without_root(bare_machine, "bash", "scripts/newest-mesa.sh", str(bare_machine))
    assert (done.returncode, "was not made by this script" in done.stderr) == (2, True)
    assert (bare_machine / "scripts" / "newest-mesa.sh").exists()


def test_set_up_with_a_wrong_purpose_is_bad_usage() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), "walk"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "setup.sh run|dev" in done.stderr) == (2, True)
