"""Bill of materials of an image in CycloneDX 1.5: Debian packages and Python distributions, read from its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from email.parser import HeaderParser
from email.utils import parseaddr
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

Component = dict[str, Any]

DPKG = Path("var/lib/dpkg/status")
LONGEST_NAME = 80  # characters, of a licence
PYTHON = "opt/quire/lib/python*/site-packages"


def of_root(root: Path, name: str, version: str) -> dict[str, Any]:
    """Returns the bill of the unpacked image at `root`. Raises ValueError if nothing is found."""
    components = sorted([*_debian(root), *_python(root)], key=lambda component: str(component["purl"]))
    if not components:
        raise ValueError(f"{root} has neither packages of Debian nor distributions of Python")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": version}},
        "components": components,
    }


def text(bill: dict[str, Any]) -> str:
    """Returns the bill as text, without times or random numbers: equal images give equal texts."""
    return json.dumps(bill, indent=2, ensure_ascii=False) + "\n"


def names(bill: dict[str, Any], kind: str) -> dict[str, str]:
    """Returns versions by name, for `deb` or `pypi`."""
    return {c["name"]: c["version"] for c in bill["components"] if c["purl"].startswith(f"pkg:{kind}/")}


def _debian(root: Path) -> Iterator[Component]:
    status = root / DPKG
    if not status.exists():
        return
    suite = _release(root)
    for paragraph in status.read_text().split("\n\n"):
        fields = HeaderParser().parsestr(paragraph.strip())
        if "installed" not in fields.get("Status", "").split():
            continue
        name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
        where = f"?arch={architecture}" + (f"&distro={suite}" if suite else "")
        supplier = parseaddr(fields.get("Maintainer", ""))[0]
        yield {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/debian/{quote(name)}@{quote(version)}{where}",
            **({"supplier": {"name": supplier}} if supplier else {}),
        }


def _release(root: Path) -> str:
    """Returns the release, such as debian-12."""
    found = root / "etc/os-release"
    if not found.exists():
        return ""
    fields = dict(line.split("=", 1) for line in found.read_text().splitlines() if "=" in line)
    return "-".join(fields[key].strip('"') for key in ("ID", "VERSION_ID") if key in fields)


def _python(root: Path) -> Iterator[Component]:
    for folder in sorted(root.glob(PYTHON)):
        for found in sorted(folder.glob("*.dist-info")):
            yield _distribution(PathDistribution(found))


def _distribution(found: Distribution) -> Component:
    metadata = found.metadata
    name, version = canonicalize_name(metadata["Name"]), metadata["Version"]
    licence = metadata.get("License-Expression") or _classified(metadata.get_all("Classifier", []))
    licence = licence or _name_of(metadata.get("License", ""))
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{quote(version)}",
        **({"licenses": [{"license": {"name": licence}}]} if licence else {}),
    }


def _name_of(licence: str) -> str:
    """Returns a licence's name; some packages put the whole text into that field."""
    return licence if len(licence) <= LONGEST_NAME and "\n" not in licence else ""


def _classified(classifiers: list[str]) -> str:
    licences = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    return " AND ".join(dict.fromkeys(licences))
