"""The path from a request to its tokens: sessions with schedulers, and the generator that all edges use."""

from __future__ import annotations

import os

from quire.services.frontend.bounds.prompts import PromptLimit
from quire.services.frontend.composition.ingress import Ingress
from quire.services.frontend.composition.served_model import ServedModel
from quire.services.frontend.composition.shared_state import SharedState
from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.media.pipeline import MediaPipeline
from quire.services.frontend.operations.scheduler_admins import SchedulerAdmins
from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.services.frontend.scheduler_client.wait_policy import WaitPolicy
from quire.services.frontend.transcription.transcriber import Transcriber
from quire.services.frontend.transcription.transcription import Transcription
from quire.shared.metrics.cluster_load import ClusterLoadCollector
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.rpc.trust import Dialler
from quire.shared.settings.frontend import FrontendSettings
from quire.shared.version import VERSION


class FrontendCore:
    """Owns the scheduler client, the generator and the resumable streams."""

    def __init__(
        self,
        settings: FrontendSettings,
        model: ServedModel,
        ingress: Ingress,
        redis: SharedState,
        *,
        address: str,
        media_address: str,
        timing: FrontendTiming,
    ) -> None:
        """Builds the parts. `address`: where other services reach this frontend's gRPC port; `media_address`: its
        MediaService, empty if there is none."""
        self._model = model
        dialler = Dialler.of(settings)
        self.client = SchedulerClient(
            settings.schedulers,
            scheduler_pb2.FrontendHello(
                frontend_id=settings.name,
                pid=os.getpid(),
                address=address,
                version=VERSION,
                model=model.identity,
                media_address=media_address,
            ),
            wait_policy=WaitPolicy(settings.unavailable_after_s, settings.worker_start_s),
            retry_after_ms=settings.retry_after_ms,
            metrics=ingress.metrics,
            dialler=dialler,
            timing=timing.connections,
        )
        self.admins = SchedulerAdmins(self.client.connections, dialler)
        self.catalogue = Catalogue(
            model.identity,
            lambda: self.client.limits,
            settings.served_model_aliases,
            modalities=() if model.media is None else model.media.modalities,
        )
        load = ClusterLoadCollector(self.cluster_load, lambda: self.catalogue.adapters, lambda: self.client.num_workers)
        ingress.metrics.registry.register(load)
        if model.media is not None:
            ingress.metrics.add_media(model.media.status)
        self.generator = self._new_generator(settings, redis, ingress)
        self.streams = redis.streams(self.generator, ingress.calls)
        self.transcription = self._new_transcription(ingress.metrics)

    def _new_transcription(self, metrics: FrontendMetrics) -> Transcription | None:
        """Returns the transcription of a model that transcribes; None for others."""
        media = self._model.media
        if not isinstance(media, MediaPipeline) or not media.transcribes:
            return None
        transcriber = Transcriber(self.generator, self._model.tokenizer, media)
        return Transcription(transcriber, media.max_samples / media.rate, metrics)

    def _new_generator(self, settings: FrontendSettings, redis: SharedState, ingress: Ingress) -> Generator:
        """Returns the generator over the model's tokenizer, the scheduler client and the locator of cached prefixes."""
        return Generator(
            catalogue=self.catalogue,
            processor=self._model.processor,
            prefix_locator=redis.prefix_locator(self._model.identity, self.client),
            client=self.client,
            tokenizer=self._model.tokenizer,
            formats=AnswerFormats(
                settings.tool_call_parser,
                settings.reasoning_parser,
                self._model.tokenizer,
                auto_tool_choice=settings.enable_auto_tool_choice,
            ),
            metrics=ingress.metrics,
            stream_interval=settings.stream_interval,
        )

    def cluster_load(self) -> dict[str, float]:
        """Returns the load of the cluster, by metric name, as its schedulers last reported it."""
        return self.client.load

    def prompt_limit(self) -> PromptLimit:
        """Returns the length limit on a prompt; its context length is 0 until a worker has reported it."""
        limits = self.client.limits
        most = 0 if limits is None else self._model.processor.most_tokens(limits.max_model_len)
        return PromptLimit(most, self._model.tokenizer.longest_token)
