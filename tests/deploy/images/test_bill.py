"""The bill of materials lists exactly what an image's files contain."""

from __future__ import annotations

import json
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.images import bill
from tests.deploy.images.__main__ import missing
from tests.deploy.paths import ROOT

STATUS = """Package: libc6
Status: install ok installed
Maintainer: GNU Libc Maintainers <glibc@example.org>
Architecture: amd64
Version: 2.36-9+deb12u10

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Creates an image root with an installed package, a removed one, and two distributions."""
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / bill.DPKG).write_text(STATUS)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('NAME="Debian"\nID=debian\nVERSION_ID="12"\n')
    packages = tmp_path / "opt/quire/lib/python3.12/site-packages"
    for name, lines in {
        "A_b-1.0": "License-Expression: MIT\n",
        "c-2": "Classifier: License :: OSI Approved :: X\n",
    }.items():
        folder = packages / f"{name}.dist-info"
        folder.mkdir(parents=True)
        own, _, version = name.partition("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {own}\nVersion: {version}\n{lines}")
    return tmp_path


def test_it_names_packages_and_distributions(root: Path) -> None:
    found = bill.of_root(root, "quire-worker", "0.1.0")
    assert [component["purl"] for component in found["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12",
        "pkg:pypi/a-b@1.0",
        "pkg:pypi/c@2",
    ]
    licences = [component.get("licenses") for component in found["components"]]
    assert licences == [None, [{"license": {"name": "MIT"}}], [{"license": {"name": "X"}}]]
    assert found["metadata"]["component"] == {"type": "container", "name": "quire-worker", "version": "0.1.0"}
    assert json.loads(bill.text(found)) == found
    assert bill.text(found) == bill.text(bill.of_root(root, "quire-worker", "0.1.0"))


@pytest.mark.parametrize(("field", "expected"), [("3-Clause BSD", ["3-Clause BSD"]), ("All of the text " * 9, [])])
def test_a_licence_that_is_only_a_field_is_named(root: Path, field: str, expected: list[str]) -> None:
    (packages,) = root.glob(bill.PYTHON)
    (packages / "c-2.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: c\nVersion: 2\nLicense: {field}\n")
    *_, last = bill.of_root(root, "quire-worker", "0.1.0")["components"]
    assert [each["license"]["name"] for each in last.get("licenses", [])] == expected


def test_an_image_without_anything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither"):
        bill.of_root(tmp_path, "quire-worker", "0.1.0")


def test_it_has_every_distribution_of_a_real_environment(tmp_path: Path) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    (tmp_path / "opt/quire/lib/python3.11").mkdir(parents=True)
    (tmp_path / "opt/quire/lib/python3.11/site-packages").symlink_to(packages)
    found = bill.names(bill.of_root(tmp_path, "quire-worker", "0.1.0"), "pypi")
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in distributions(path=[str(packages)])}
    assert len(found) > 50
    assert found == installed


@pytest.mark.parametrize("role", ["frontend", "scheduler", "worker"])
def test_what_the_package_asks_for_and_a_bill_lacks_is_told(role: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"][role]]]
    names = {canonicalize_name(need.name) for need in asked if need.marker is None or need.marker.evaluate()} | {
        "quire"
    }
    assert missing([role], names) == set()
    for name in names:
        assert missing([role], names - {name}) == {name}
