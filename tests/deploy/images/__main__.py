"""`python -m tests.deploy.images build|test|push|clean`: builds and tests the images. See k8s/README.md for
requirements."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire.shared.version import VERSION
from tests.deploy.images import bill, cluster, contents, cuda
from tests.deploy.images.builder import IMAGES, WORKER_CUDA, Builder, Image
from tests.deploy.paths import ROOT

# Unpacked, with what they are built on; the libraries of PyAV take 104 MB of a frontend.
MOST_MB = {"frontend": 355, "scheduler": 250}
WITHOUT_GPU = ("frontend", "scheduler", "worker")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.images", description=__doc__)
    parser.add_argument("what", choices=("build", "test", "push", "clean"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quire-images")
    parser.add_argument(
        "--images", nargs="+", choices=IMAGES, default=WITHOUT_GPU, metavar="NAME", help=", ".join(IMAGES)
    )
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--to", metavar="WHERE", help="push: docker://REGISTRY/PATH or oci-archive:FOLDER")
    asked = parser.parse_args()
    if (asked.what == "push") != (asked.to is not None):
        parser.error("--to: says where to push, and is of push alone")
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            print(f"images: {tool} is not installed: apt-get install {tool}", file=sys.stderr)
            return 1
    if asked.what == "clean":
        shutil.rmtree(asked.folder, ignore_errors=True)
        return 0
    builder, images = Builder(asked.folder), [IMAGES[name] for name in dict.fromkeys(asked.images)]
    match asked.what:
        case "build":
            return build(builder, images, dict(one.split("=", 1) for one in asked.build_arg))
        case "push":
            return push(builder, images, asked.to)
        case _:
            return test(builder, images)


def build(builder: Builder, images: Sequence[Image], arguments: dict[str, str]) -> int:
    builder.make_bases()
    for image in images:
        print(f"{image.tag}: built in {builder.build(image, arguments):.0f} s", flush=True)
    too_large = []
    for image in images:
        base, *own = builder.layers(image.tag)
        whole = (base + sum(own)) / 1e6
        print(f"{image.tag}: {whole:.0f} MB, {sum(own) / 1e6:.0f} MB of them on a base of {base / 1e6:.0f} MB")
        if whole > MOST_MB.get(image.name, float("inf")):
            too_large.append(image.tag)
    if too_large:
        print(f"images: larger than they may be: {', '.join(too_large)}", file=sys.stderr)
    lacking = [image.tag for image in images if not write_bill(builder, image)]
    wasteful = [image.tag for image in images if image.name in MOST_MB and not is_lean(builder, image)]
    return int(bool(too_large or lacking or wasteful))


def test(builder: Builder, images: Sequence[Image]) -> int:
    """Tests the images: those that need no GPU run as a cluster; the GPU image is inspected."""
    checks = [cuda.look] if WORKER_CUDA in images else []
    if any(image != WORKER_CUDA for image in images):
        checks.append(cluster.talk)
    return int(not all(check(builder) for check in checks))


def push(builder: Builder, images: Sequence[Image], where: str) -> int:
    """Pushes the images and prints the digests for manifests."""
    try:
        places = [destination(image, where) for image in images]
    except ValueError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    for image, place in zip(images, places, strict=True):
        print(f"{image.published}@{builder.push(image, place)}", flush=True)
    return 0


def destination(image: Image, where: str) -> str:
    """Returns a destination in the notation of containers-transports(5)."""
    folder = where.rstrip("/")
    match where.partition(":")[0]:
        case "docker":
            return f"{folder}/{image.published}"
        case "oci-archive":
            return f"{folder}/quire-{image.name}.tar:{image.published}"
        case other:
            raise ValueError(f"--to: {where!r}: {other!r} is neither docker://REGISTRY/PATH nor oci-archive:FOLDER")


def write_bill(builder: Builder, image: Image) -> bool:
    """Writes the image's bill of materials next to it; returns False if a required package is missing."""
    with builder.unpacked(image) as root:
        found = bill.of_root(root, f"quire-{image.name}", VERSION)
    path = builder.folder / f"quire-{image.name}.cdx.json"
    path.write_text(bill.text(found))
    lacking = missing(image.extras, set(bill.names(found, "pypi")))
    counts = {kind: len(bill.names(found, kind)) for kind in ("deb", "pypi")}
    print(f"{image.tag}: {counts['deb']} packages of Debian, {counts['pypi']} distributions of Python: {path}")
    if lacking:
        print(f"images: {image.tag} lacks {', '.join(sorted(lacking))}", file=sys.stderr)
    return not lacking


def is_lean(builder: Builder, image: Image) -> bool:
    with builder.unpacked(image) as root:
        found = contents.superfluous(root)
    if found:
        print(f"images: {image.tag} has no use for {', '.join(found)}", file=sys.stderr)
    return not found


def missing(extras: Sequence[str], present: set[str]) -> set[str]:
    """Returns distributions that pyproject.toml requires with `extras` and that are not present."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    asked = map(Requirement, [*project["dependencies"], *(need for extra in extras for need in optional[extra])])
    needed = {canonicalize_name(need.name) for need in asked if need.marker is None or need.marker.evaluate()}
    return (needed | {"quire"}) - present


if __name__ == "__main__":
    sys.exit(main())
