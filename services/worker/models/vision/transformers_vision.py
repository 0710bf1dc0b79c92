"""Vision towers and projectors of transformers, for families without code of their own here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from quire.services.worker.models.vision.normalization import normalize
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.config_file import ConfigFile
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization


class TransformersVision:
    """Encoder that calls get_image_features() of a class of transformers. All tiles have one size, and each has the
    same number of rows."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, values: Mapping[str, Any], place: LayerPlacement, normalization: Normalization) -> None:
        """Builds tower and projector without weights. `values`: the whole config.json. Raises InvalidArgument if
        transformers refuses them."""
        self._normalization, self._dtype = normalization, place.dtype
        self._model = _build(values, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.data

    def finish(self) -> None:
        self._model.requires_grad_(False)

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, tile after tile, [num_tiles * rows of a tile, text width]."""
        import torch

        pixels = normalize(torch.cat([item.pixels for item in items]), self._normalization, self._dtype)
        found = self._model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        rows: Tensor = found.view(pixels.size(0), -1, found.size(-1))
        return [part.flatten(0, 1) for part in rows.split([item.pixels.size(0) for item in items])]


def make_transformers_vision(
    config: ConfigFile, vision: ConfigFile, text_size: int, place: LayerPlacement, normalization: Normalization
) -> TransformersVision:
    """Makes the encoder of a model. Raises InvalidArgument if its text model has not the width that rows need."""
    found = TransformersVision(config.values, place, normalization)
    width = found._model.config.get_text_config().hidden_size
    if width != text_size:
        text = f"config.json: text_config.hidden_size is {width} for pictures, and {text_size} for text"
        raise InvalidArgument(text, field="model")
    return found


def _build(values: Mapping[str, Any], place: LayerPlacement) -> Any:
    """Builds the class's base model without its text model. Raises InvalidArgument for a configuration that the class
    does not take."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.for_model(**values)
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None  # the text model is dropped
        with no_init_weights(), torch.device(place.device):
            model = AutoModelForImageTextToText.from_config(config, dtype=place.dtype).base_model
    except (ValueError, TypeError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"config.json: transformers does not make its encoder: {reason}", field="model") from None
    del model.language_model
    return model.eval()
