"""Workloads with media: sizes, seeds and the messages that carry them."""

from __future__ import annotations

import io
import wave

from PIL import Image

from quire.bench.load_client.grpc_calls import GrpcCaller
from quire.bench.workload import media_workloads
from quire.bench.workload.picture_shapes import IMAGE_PAD
from quire.bench.workload.workloads import Workload
from quire.shared.pb.inference.v1 import inference_pb2 as pb


def requests(work: Workload) -> list[pb.GenerateRequest]:
    caller = GrpcCaller("127.0.0.1:1", 0.0, final_only=True, frontends=1)
    return [pb.GenerateRequest.FromString(caller.body(item)) for item in work.first(2).items]


def test_pictures_have_the_stated_size_and_a_place_in_the_prompt() -> None:
    for request in requests(media_workloads.pictures8()):
        sizes = [Image.open(io.BytesIO(image.content)).size for image in request.images]
        assert sizes == [media_workloads.SMALL] * 8
        assert list(request.token_ids.ids).count(IMAGE_PAD) == 8


def test_clips_are_thirty_seconds_of_sound() -> None:
    for request in requests(media_workloads.clips()):
        with wave.open(io.BytesIO(request.audios[0].content)) as file:
            assert file.getnframes() == 30 * file.getframerate()


def test_only_new_workloads_have_other_media_in_each_run() -> None:
    def contents(work: Workload) -> set[bytes]:
        return {request.images[0].content for number in range(2) for request in requests(work.in_run(number))}

    assert len(contents(media_workloads.pictures())) == 4
    assert len(contents(media_workloads.pictures_again())) == 2
