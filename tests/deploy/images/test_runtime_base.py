"""The runtime base contains what Python needs of a Debian root, and its package database is accurate."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.deploy.images import bill, runtime_base

DEPENDENCIES = {
    "python-is-python3": "python3",
    "python3": "python3.11 (= 3.11.2-1+b1), python3-minimal:any",
    "python3.11": "libc6 (>= 2.36), libssl3, gone | mime-support",
    "python3-minimal": "dpkg (>= 1.13.20), python3.11",
    "libssl3": "debconf (>= 0.5) | debconf-2.0, libc6",
    "media-types": "",
    "libc6": "",
    "libstdc++6": "libc6",
    "ca-certificates": "openssl, debconf",
    "openssl": "libssl3",
    "tzdata": "debconf | debconf-2.0",
    "base-files": "awk",
    "libc-bin": "libc6",
    "dpkg": "tar",
    "debconf": "perl-base",
    "mawk": "libc6",
    "perl-base": "libc6",
    "tar": "libc6",
    "dash": "libc6",
}
PROVIDED = {"media-types": "mime-support, libc6 (= 0)", "mawk": "awk", "debconf": "debconf-2.0"}
NEEDED = {*runtime_base.ROOTS, "python3", "python3.11", "python3-minimal", "libssl3", "openssl", "media-types", "libc6"}
FILES = {
    "python3.11": ["/usr/lib/python3.11", "/usr/lib/python3.11/os.py", "/usr/bin/python3.11"],
    "libc6": ["/lib", "/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu/libc.so.6"],
    "base-files": ["/bin", "/etc", "/tmp", "/usr/lib/os-release", "/etc/os-release"],
    "dash": ["/bin", "/bin/dash", "/bin/sh"],
    "perl-base": ["/usr/bin/perl", "/usr/lib/python3.11", "/usr/lib/python3.11/odd.py"],
}


def paragraph(name: str) -> str:
    lines = ["Package: " + name, "Status: install ok installed", "Maintainer: Świder <s@example.org>"]
    lines += ["Architecture: amd64", "Version: 1", f"Pre-Depends: {DEPENDENCIES[name]}"]
    return "\n".join([*lines, f"Provides: {PROVIDED.get(name, '')}", "Description: of one line", " and more"]) + "\n"


def status(names: Mapping[str, str]) -> bytes:
    gone = "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    return "\n".join([gone, *map(paragraph, names)]).encode()


Made = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def full(tmp_path: Path) -> Made:
    """Creates a root archive as mmdebstrap does."""
    contents = {
        "var/lib/dpkg/status-old": b"",
        "var/cache/apt/pkgcache.bin": b"",
        "etc/passwd": b"root:x:0:0::/root:/bin/sh\n",
        "etc/hostname": b"of-whoever-built-it\n",
        "etc/ssl/certs/ca-certificates.crt": b"-----BEGIN CERTIFICATE-----\n",
        "usr/lib/python3.11/__pycache__/os.cpython-311.pyc": b"os",
        "usr/lib/python3.11/__pycache__/odd.cpython-311.pyc": b"odd",
        "usr/lib/python3.11/os.py": b"import sys\n",
        "usr/lib/python3.11/odd.py": b"",
        "usr/lib/x86_64-linux-gnu/libc.so.6": b"\x7fELF",
        "usr/lib/os-release": b'ID=debian\nVERSION_ID="12"\n',
        "usr/bin/python3.11": b"\x7fELF",
        "usr/bin/dash": b"\x7fELF",
        "usr/bin/perl": b"\x7fELF",
        **{f"var/lib/dpkg/info/{name}.list": "\n".join(["/.", *paths, ""]).encode() for name, paths in FILES.items()},
    }
    contents["var/lib/dpkg/info/libc6:amd64.list"] = contents.pop("var/lib/dpkg/info/libc6.list")
    links = {"bin": "usr/bin", "lib": "usr/lib", "etc/os-release": "../usr/lib/os-release", "usr/bin/sh": "dash"}

    def made(packages: Mapping[str, str]) -> Path:
        with tarfile.open(tmp_path / "full.tar", "w") as out:
            for name, content in {"var/lib/dpkg/status": status(packages), **contents}.items():
                member = tarfile.TarInfo(f"./{name}")
                member.size, member.mode = len(content), 0o755
                out.addfile(member, io.BytesIO(content))
            for name, target in links.items():
                member = tarfile.TarInfo(f"./{name}")
                member.type, member.linkname = tarfile.SYMTYPE, target
                out.addfile(member)
            for name in ("tmp", "usr/lib/python3.11"):
                member = tarfile.TarInfo(f"./{name}/")
                member.type, member.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                out.addfile(member)
        return tmp_path / "full.tar"

    return made


def test_it_has_the_files_of_what_python_depends_on_and_of_nothing_else(full: Made, tmp_path: Path) -> None:
    runtime_base.select(full(DEPENDENCIES), tmp_path / "small.tar")
    with tarfile.open(tmp_path / "small.tar") as small:
        members = {member.name.removeprefix("./"): member for member in small}
        assert set(members) == {
            "bin", "lib", "tmp", "etc/os-release", "etc/passwd", "etc/ssl/certs/ca-certificates.crt",
            "usr/bin/python3.11", "usr/lib/os-release", "usr/lib/python3.11", "usr/lib/python3.11/os.py",
            "usr/lib/python3.11/__pycache__/os.cpython-311.pyc", "usr/lib/x86_64-linux-gnu/libc.so.6",
            "var/lib/dpkg/status",
        }  # fmt: skip
        assert members["bin"].linkname == "usr/bin"
        assert members["tmp"].mode == 0o1777
        source = small.extractfile(members["usr/lib/python3.11/os.py"])
        assert source is not None
        assert source.read() == b"import sys\n"


def test_a_bill_of_it_names_what_is_left(full: Made, tmp_path: Path) -> None:
    runtime_base.select(full(DEPENDENCIES), tmp_path / "small.tar")
    with tarfile.open(tmp_path / "small.tar") as small:
        small.extraction_filter = getattr(tarfile, "tar_filter", None)  # Debian 12's Python knows no filters
        small.extractall(tmp_path / "root")
    found = bill.of_root(tmp_path / "root", "quire-scheduler", "0.1.0")
    assert set(bill.names(found, "deb")) == NEEDED
    assert {component["supplier"]["name"] for component in found["components"]} == {"Świder"}
    kept = (tmp_path / "root" / bill.DPKG).read_text()
    assert all(paragraph(name) in kept for name in NEEDED)


@pytest.mark.parametrize("name", runtime_base.ROOTS)
def test_a_root_that_is_not_installed_is_an_error(name: str, full: Made, tmp_path: Path) -> None:
    rest = {package: needs for package, needs in DEPENDENCIES.items() if package != name}
    with pytest.raises(ValueError, match=f"no package of .*full.tar is or provides {name.replace('+', '.')}$"):
        runtime_base.select(full(rest), tmp_path / "small.tar")
    assert not (tmp_path / "small.tar").exists()


def test_a_dependency_that_is_not_installed_is_an_error(full: Made, tmp_path: Path) -> None:
    rest = {package: needs for package, needs in DEPENDENCIES.items() if package != "media-types"}
    with pytest.raises(ValueError, match=r"is or provides gone or mime-support$"):
        runtime_base.select(full(rest), tmp_path / "small.tar")
