"""Names and destinations of published images."""

from __future__ import annotations

import pytest
import yaml

from tests.deploy.images.__main__ import destination
from tests.deploy.images.builder import IMAGES, WORKER_CUDA
from tests.deploy.paths import COMPOSE


def test_images_are_published_under_the_names_that_compose_has() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"].values()
    named = {service["image"] for service in services if service["image"].startswith("quire-")}
    assert named == {image.published for image in IMAGES.values()}


def test_every_image_has_a_stage_name_tag_and_file_of_its_own() -> None:
    for distinct in ("name", "tag", "published"):
        assert len({getattr(image, distinct) for image in IMAGES.values()}) == len(IMAGES)


@pytest.mark.parametrize(
    ("where", "destined"),
    [
        ("docker://registry:5000/team", f"docker://registry:5000/team/{WORKER_CUDA.published}"),
        ("docker://registry:5000/team/", f"docker://registry:5000/team/{WORKER_CUDA.published}"),
        ("oci-archive:/out", f"oci-archive:/out/quire-worker-cuda.tar:{WORKER_CUDA.published}"),
    ],
)
def test_a_registry_gets_a_tag_and_an_archive_a_file_for_each_image(where: str, destined: str) -> None:
    assert destination(WORKER_CUDA, where) == destined


@pytest.mark.parametrize("where", ["", "registry/team", "dir:/out"])
def test_a_place_of_another_kind_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match=f"--to: '{where}'.* is neither docker://REGISTRY/PATH nor oci-archive:FOLDER"):
        destination(WORKER_CUDA, where)
