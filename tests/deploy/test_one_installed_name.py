"""The wheel adds exactly one name, `quire`, to an environment and works beside other packages and files of any name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.test_wheel import installed, run  # noqa: F401  # the fixture

TAKEN = ("services", "shared", "protos", "kernels", "training", "evals", "tests", "tools")
STRANGERS = ("services/__init__.py", "shared.py", "kernels.py", "redis.py", "logging_config.py", "protos/__init__.py")
FOREIGN = 'raise ImportError("a file of the user was imported by Quire")\n'
GENERATE = """
from quire import LLM, SamplingParams
if __name__ == "__main__":
    with LLM() as llm:
        print(llm.generate(["Once upon"], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].text)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Creates a working folder with modules named like packages which Quire or its dependencies import."""
    for name in STRANGERS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FOREIGN)
    return tmp_path


@pytest.mark.slow
def test_the_wheel_installs_one_package(installed: Path) -> None:  # noqa: F811
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} - {"bin"}
    assert names == {"quire"}
    assert not [path for path in installed.rglob("*") if path.is_symlink()]


@pytest.mark.slow
def test_packages_of_others_keep_their_names(installed: Path, tmp_path: Path) -> None:  # noqa: F811
    others = tmp_path / "others"
    for name in TAKEN:
        (others / name).mkdir(parents=True)
        (others / name / "__init__.py").write_text(f"OWNER = 'another project: {name}'\n")
    code = "import importlib, quire.services.frontend, quire.shared.errors, quire.kernels, quire.protos.generate\n"
    code += f"for name in {TAKEN!r}: print(importlib.import_module(name).OWNER)"
    seen = run(installed, tmp_path, "-c", code, PYTHONPATH=os.pathsep.join((str(installed), str(others))))
    assert seen.stdout.splitlines() == [f"another project: {name}" for name in TAKEN], seen.stderr
    demo = run(
        installed, tmp_path, "-P", "-m", "quire", "demo", PYTHONPATH=os.pathsep.join((str(installed), str(others)))
    )
    assert demo.returncode == 0, demo.stderr
    assert "\n68\n" in demo.stdout


PICKLED = """
import pickle, sys
from quire import SamplingParams
from quire.outputs import CompletionOutput, RequestOutput
from quire.shared.errors import InvalidArgument
output = RequestOutput("id", "prompt", [CompletionOutput(0, "text")])
values = [SamplingParams(max_tokens=3), output, InvalidArgument("no", field="n")]
again = pickle.loads(pickle.dumps(values))
assert again[:2] == values[:2], again
assert (again[2].message, again[2].field) == ("no", "n")
print(sorted({type(value).__module__ for value in again}))
"""


@pytest.mark.slow
def test_values_of_users_can_be_pickled_beside_packages_of_any_name(installed: Path, folder: Path) -> None:  # noqa: F811
    done = run(installed, folder, "-P", "-c", PICKLED)
    assert done.stdout.strip() == "['quire.outputs', 'quire.params', 'quire.shared.errors']", done.stderr


@pytest.mark.slow
def test_the_command_ignores_the_working_folder(installed: Path, folder: Path) -> None:  # noqa: F811
    demo = run(installed, folder, str(installed / "bin" / "quire"), "demo")
    assert (demo.returncode, demo.stderr) == (0, "")
    assert "\n68\n" in demo.stdout


@pytest.mark.slow
def test_the_services_of_a_script_ignore_its_folder(installed: Path, folder: Path) -> None:  # noqa: F811
    """Python itself puts a script's folder in front of the path of that process, but not of Quire's child processes."""
    (folder / "generate.py").write_text(GENERATE)
    done = run(installed, folder, "generate.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_an_editable_install_maps_one_package(tmp_path: Path) -> None:
    """Only `quire` can be imported outside of the checkout, however the package is installed."""
    code = f"import importlib.util\nprint([name for name in {TAKEN!r} if importlib.util.find_spec(name)])\nimport quire"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
